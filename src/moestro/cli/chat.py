"""`moestro chat`: a conversation in the terminal, with a model of this process or with an endpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moestro.cli import options
from moestro.cli.prompts import read_text
from moestro.cli.refusal import refusals
from moestro.cli.screen import note, read, show_all, view_of
from moestro.cli.sizes import memory_budget
from moestro.errors import MoestroError, invalid_input

if TYPE_CHECKING:
    from moestro.hf import MoestroConfig
    from moestro.hf.generate import Sampling
    from moestro.serve.conversation import Conversation
    from moestro.serve.partners import Partner, Usage


def chat(
    model: Annotated[str | None, typer.Argument(help="A local folder or a hub id.")] = None,
    url: Annotated[str | None, typer.Option(help="Of an OpenAI endpoint, in the place of a model.")] = None,
    name: Annotated[str | None, typer.Option("--model", help="With --url: the model; else the first listed.")] = None,
    api_key: Annotated[str | None, typer.Option(help="With --url: else MOESTRO_API_KEY in the environment.")] = None,
    template: Annotated[Path | None, typer.Option(help="A file with a chat template, for a model without one.")] = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Text as it comes, and no markdown.")] = False,
    max_new_tokens: options.MaxNewTokens = None,
    do_sample: options.DoSample = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    no_repeat_ngram_size: options.NoRepeatNgramSize = None,
    seed: Annotated[
        int | None, typer.Option(help="With --do-sample: of the first answer; the next has one more.")
    ] = None,
    stop: options.Stop = None,
    dtype: options.Dtype = "auto",
    format: options.Format = None,
    input_format: options.InputFormat = "float",
    projections: options.Projections = "auto",
    memory: options.Memory = None,
    prefetch: options.Prefetch = False,
    device_memory: options.DeviceMemory = None,
    device: options.Device = "cpu",
    strategy: options.Strategy = "auto",
) -> None:
    """Talk with a model, or with an OpenAI endpoint (--url).

    /help lists what can be typed beside messages. Ctrl-C ends an answer, Ctrl-D the chat. Without a terminal each line
    of standard input is a message, answers go to stdout, and what cannot be done ends it with exit code 2.
    For instance: moestro chat openai/gpt-oss-20b --memory 8GB
    """
    with refusals():
        from moestro.hf import MoestroConfig
        from moestro.hf.generate import Sampling
        from moestro.hf.text_model import quiet_transformers
        from moestro.serve.conversation import Conversation

        picked = temperature, top_k, top_p, min_p, repetition_penalty, seed
        sampling = Sampling(max_new_tokens, do_sample, *picked, tuple(stop or ()), no_repeat_ngram_size)
        budget = memory_budget("chat", memory, prefetch, device_memory)
        how = MoestroConfig(format, input_format=input_format, projections=projections, memory=budget)  # type: ignore[arg-type]
        source = Source(model, template, system, (dtype, device, strategy), how)
        with quiet_transformers(progress=sys.stderr.isatty()):
            partner = endpoint(source, url, name, api_key, sampling) if url else local(source, name, api_key, sampling)
            with closing(partner):
                Session(partner, Conversation(system), plain).run()


@dataclass(frozen=True)
class Source:
    """What to load, and how: `place` is dtype, device and strategy."""

    model: str | None
    template: Path | None
    system: str | None
    place: tuple[str, str, str]
    how: MoestroConfig


def endpoint(source: Source, url: str, name: str | None, key: str | None, sampling: Sampling) -> Partner:
    """The endpoint at `url`. What says how a model is loaded is refused beside it."""
    from moestro import settings
    from moestro.hf import MoestroConfig
    from moestro.serve.partners import Endpoint

    if (
        source.model
        or source.template
        or source.place != ("auto", "cpu", "auto")
        or source.how != MoestroConfig(projections="auto")
    ):
        raise invalid_input(
            "chat",
            got="--url with a model to load, or with options of loading",
            needs="the one or the other",
            fix="Name the endpoint's model by --model; how it is loaded is the endpoint's affair.",
        )
    kept = (settings.api_keys() or "").split(",")[0].strip()
    return Endpoint(url, name, key or kept or None, sampling)


def local(source: Source, name: str | None, key: str | None, sampling: Sampling) -> Partner:
    """The model, loaded. Whether it can chat as asked is seen before its weights are read."""
    from moestro.hf.generate import check_length
    from moestro.hf.text_model import load_text_model
    from moestro.serve.conversation import Conversation
    from moestro.serve.partners import LocalModel

    if name is not None or key is not None:
        raise invalid_input(
            "chat", got="--model or --api-key without --url", needs="--url", fix="Name a model to load as the argument."
        )
    template = None if source.template is None else read_text("chat", "--template", source.template)
    greeting = Conversation(source.system)
    greeting.ask("?")

    def check(model: str, tokenizer: Any, context: int | None) -> None:
        if template is not None:
            tokenizer.chat_template = template
        if not tokenizer.chat_template:
            raise invalid_input(
                "chat",
                got=f"{model}, whose tokenizer has no chat template",
                needs="an instruction-tuned model",
                fix="Give a template by --template FILE, or continue texts by moestro generate.",
            )
        check_length(model, tokenizer, context, (greeting.prompt, sampling))

    dtype, device, strategy = source.place
    return LocalModel(load_text_model(source.model, dtype, device, strategy, check, source.how), sampling)


@dataclass
class Totals:
    """What all answers of a chat took together."""

    answers: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    steps: int = 0

    def add(self, usage: Usage) -> None:
        """An answer more."""
        self.answers += 1
        self.new_tokens += usage.new_tokens or 0
        if usage.tokens_per_second is not None:
            self.steps += (usage.new_tokens or 1) - 1
            self.seconds += usage.new_seconds


@dataclass
class Session:
    """One chat: reads what the user types, and does it."""

    partner: Partner
    conversation: Conversation
    plain: bool
    totals: Totals = field(default_factory=Totals)
    last: Usage | None = None
    _warned: bool = False

    @property
    def interactive(self) -> bool:
        return sys.stdin is not None and sys.stdin.isatty()

    def run(self) -> None:
        """Until the user leaves."""
        if self.interactive:
            for line in self.partner.experts()[:1]:
                note(line)
            note(f"{self.partner.name}. /help lists commands; Ctrl-D leaves.")
        left = False
        while not left:
            try:
                text = read(self.interactive)
                self._warned = False
                left = self._turn(text)
            except EOFError:
                if self.interactive:
                    note("")
                return
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                if self._warned:
                    note("")
                    return
                self._warned = True
                note("\n(Ctrl-C once more, Ctrl-D or /quit leaves.)")
            except MoestroError as error:
                if not self.interactive:
                    raise
                note(" ".join(str(error).split()))

    def _turn(self, text: str) -> bool:
        """Do what was typed; True to leave."""
        if not text.strip():
            return False
        if not text.startswith("/"):
            self.conversation.ask(text)
            self._answer()
            return False
        word, _, rest = text.partition(" ")
        if word not in COMMANDS:
            raise invalid_input(
                "chat",
                got=word,
                needs=f"one of {', '.join(COMMANDS)}",
                fix="Begin a message of this form with a space.",
            )
        return COMMANDS[word].run(self, rest.strip())

    def _answer(self) -> None:
        from moestro.serve.partners import Usage

        usage, said = Usage(), list[str]()
        pieces = self.partner.answer(self.conversation.prompt, usage)
        try:
            with closing(pieces):  # type: ignore[type-var]
                show_all(pieces, view_of(self.plain), said)
        except KeyboardInterrupt:
            usage.reason = "interrupted"
            if not self.interactive:
                raise
        finally:
            self.conversation.answer("".join(said))
        self.last = usage
        self.totals.add(usage)
        note(summary(usage, self.partner.context))
        if not said:
            note("Nothing was said; the conversation is as it was before.")


def summary(usage: Usage, context: int | None) -> str:
    """The line after an answer."""
    parts = [] if usage.new_tokens is None else [f"{usage.new_tokens} tokens"]
    if usage.tokens_per_second is not None:
        parts.append(f"{usage.tokens_per_second:.1f} tokens/s")
    if usage.first_seconds:
        parts.append(f"first after {usage.first_seconds:.2f} s")
    if usage.prompt_tokens is not None:
        total = usage.prompt_tokens + (usage.new_tokens or 0)
        reused = f", {usage.cached_tokens} reused" if usage.cached_tokens else ""
        parts.append(f"context {total}{'' if context is None else f' of {context}'}{reused}")
    said = {
        "interrupted": "stopped by Ctrl-C",
        "length": "cut off at --max-new-tokens",
        "context": "the context is full: keep the chat with /save FILE, and begin anew with /reset",
    }
    if usage.reason in said:
        parts.append(said[usage.reason])
    return "; ".join(parts)


def _help(session: Session, rest: str) -> bool:
    for word, command in COMMANDS.items():
        note(f"{word + command.argument:16} {command.help}")
    note('"""              begins and ends a message of several lines')
    return False


def _reset(session: Session, rest: str) -> bool:
    session.conversation.messages.clear()
    note("What was said is forgotten; the system prompt stays.")
    return False


def _system(session: Session, rest: str) -> bool:
    if rest:
        session.conversation.system = None if rest == "-" else rest
    note(f"System prompt: {session.conversation.system or 'none'}")
    return False


def _path(rest: str) -> Path:
    if not rest:
        raise invalid_input("chat", got="no file", needs="its name after the command", fix="/save chat.json")
    return Path(rest).expanduser()


def _save(session: Session, rest: str) -> bool:
    path = _path(rest)
    session.conversation.save(path)
    note(f"Saved {len(session.conversation.messages)} messages to {path}.")
    return False


def _load(session: Session, rest: str) -> bool:
    from moestro.serve.conversation import load_conversation

    session.conversation = load_conversation(_path(rest))
    note(f"Loaded {len(session.conversation.messages)} messages.")
    return False


def _stats(session: Session, rest: str) -> bool:
    totals = session.totals
    speed = f", {totals.steps / totals.seconds:.1f} tokens/s" if totals.seconds else ""
    note(f"{session.partner.name}: {totals.answers} answers, {totals.new_tokens} tokens{speed}")
    if session.last is not None:
        note(f"the last: {summary(session.last, session.partner.context)}")
    for line in session.partner.experts():
        note(line)
    return False


def _retry(session: Session, rest: str) -> bool:
    messages = session.conversation.messages
    before = list(messages)
    if not session.conversation.take_back_answer():
        raise invalid_input("chat", got="/retry", needs="something that was asked", fix="Type a message.")
    try:
        session._answer()
    finally:
        if len(messages) < len(before):
            messages[:] = before
    return False


def _quit(session: Session, rest: str) -> bool:
    return True


@dataclass(frozen=True)
class Command:
    """What a word that begins with / does; `run` says whether to leave."""

    run: Callable[[Session, str], bool]
    help: str
    argument: str = ""


COMMANDS = {
    "/help": Command(_help, "this list"),
    "/reset": Command(_reset, "forget what was said"),
    "/system": Command(_system, "set the system prompt, show it, or take it away with -", " TEXT"),
    "/save": Command(_save, "write all messages as JSON", " FILE"),
    "/load": Command(_load, "take up what /save wrote", " FILE"),
    "/stats": Command(_stats, "tokens and speeds so far"),
    "/retry": Command(_retry, "another answer to the last message"),
    "/quit": Command(_quit, "leave"),
}
