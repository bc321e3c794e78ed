"""The endpoint with the bundled model."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from endpoint import Endpoint, serving
from moestro.hf.text_model import TextModel, load_text_model, quiet_transformers
from moestro.serve.engine import Engine
from moestro.serve.metrics import Loads, Metrics
from moestro.serve.service import Limits, Service

NAME = "bundled"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    with quiet_transformers():
        found = load_text_model()
    found.tokenizer.chat_template = TEMPLATE
    # No token has this id: texts are as long as asked for, of tokens that are drawn as they are likely.
    found.model.generation_config.update(eos_token_id=4096, repetition_penalty=1.0, no_repeat_ngram_size=0)
    return found


@pytest.fixture(scope="session")
def endpoint(text_model: TextModel) -> Iterator[Endpoint]:
    loads = Loads(text_model.model.get_submodule(layer.path) for layer in text_model.served)
    with loads.watched():
        engine = Engine(text_model)
    service = Service(text_model, engine, NAME, Limits(max_body=1 << 16), Metrics(loads))
    with serving(service) as found:
        yield found
    service.close()


class StrictHandler(logging.StreamHandler[io.StringIO]):
    """An argument that does not fit its message is an error."""

    def handleError(self, record: logging.LogRecord) -> None:
        raise


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What the server logs meanwhile."""
    text = io.StringIO()
    handler, logger = StrictHandler(text), logging.getLogger("moestro.serve")
    logger.addHandler(handler)
    yield text
    logger.removeHandler(handler)
