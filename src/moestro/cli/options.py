"""Options that several commands have: what a model is loaded with, and how its tokens are picked."""

from __future__ import annotations

from typing import Annotated

import typer

MaxNewTokens = Annotated[int | None, typer.Option(help="At most; else 256, or what the context leaves.")]
DoSample = Annotated[bool | None, typer.Option(help="Sample, or take the likeliest; else as the model says.")]
Temperature = Annotated[float | None, typer.Option(help="With --do-sample; 0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="With --do-sample: the k likeliest tokens only.")]
TopP = Annotated[float | None, typer.Option(help="With --do-sample: the likeliest of this probability.")]
MinP = Annotated[float | None, typer.Option(help="With --do-sample: those of this share of the best.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1 to repeat less.")]
NoRepeatNgramSize = Annotated[int | None, typer.Option(help="No run of so many tokens twice; 0 for no limit.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's.")]
Format = Annotated[str | None, typer.Option(help="Read the experts into this format: mxfp4, int8, ...")]
InputFormat = Annotated[str, typer.Option(help="Of what meets the experts: float, int8, fp8-e4m3.")]
Projections = Annotated[str, typer.Option(help="Linear modules: auto, torch, or stored as int8, ...")]
Memory = Annotated[str | None, typer.Option(help="Bytes for all experts, as 8GB; the others are read as needed.")]
Prefetch = Annotated[bool, typer.Option("--prefetch", help="With --memory: read what the next layer will ask for.")]
DeviceMemory = Annotated[str | None, typer.Option(help="With --memory and a GPU: bytes of it for experts.")]
Device = Annotated[str, typer.Option(help="A torch device.")]
Strategy = Annotated[str, typer.Option(help="auto, grouped, blockwise, selective or all_experts.")]
