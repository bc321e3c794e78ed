"""Tiles for a GPU: a function of shape, stored format and device. Imports no Triton.

Those of Hopper follow what was timed on an H200 and an H100 (docs/log.md, "The first GPU" and the second); those of
other parts follow what others have published, and none has been measured with these kernels yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from moestro.ops.gpu import Device

LEAST_ROWS, MOST_ROWS = 16, 128
"""Rows of the lowest and of the highest tile."""

INVARIANT_ROWS = 64
"""Rows of every tile where a token's bits must not depend on its batch."""

PAIRS_BETA = 4
"""Pairs are not ordered while beta * T * K <= E: then hardly two of them name one expert."""

STEPPED_ROWS = 64
"""Rows of the highest tile where a scale meets the sum of each step, which takes a second sum: not on Hopper, whose
tiles have fewer columns instead, unless rows have 8 bits."""

_RESERVED = 1024
"""Bytes of shared memory that CUDA keeps of each block's for itself, beside what the block may have."""
_EXCHANGED = 2 << 10
"""Bytes of it beside what is loaded, at most: largest numbers that warps tell each other, and the state of copies."""
_REGISTERS, _MOST_REGISTERS = 1 << 16, 256
"""Of a multiprocessor, and of a thread where a tile does not say."""

IN_FLIGHT = 48 << 10
"""Bytes of weights that a multiprocessor is to have asked for at once where reading them is what takes the time."""

LEAST_MAPPED = 384_000_000
"""Bytes of nibbles that a call reads, from which tensor maps are worth what they take the host: gpt-oss-20b's 423 MB
were read 38 us faster on an H100, OLMoE's 214 MB 9 to 12 us."""

_LIGHT_SCALES = 4.25
"""Bits of a weight of mxfp4, scales included. With scales that take more, a step of 128 columns needs more registers
than there are."""

LEAST_COLUMNS = 64
"""Of a tile: where these are too few for all multiprocessors, the sum over I is cut and not the tile."""

_MOST_STAGES, _MOST_SPLITS = 10, 8
_IDLE = 8
"""One of so many multiprocessors may have no tile."""
_FEW_TILES, _EVEN = 4, 0.9
"""Of a multiprocessor, up to which it matters that all have as many; and the share of that number that is enough."""


@dataclass(frozen=True)
class Problem:
    """What a choice depends on.

    Attributes:
        num_tokens, top_k, num_experts, hidden_size, intermediate_size: T, K, E, H, I.
        halves: 2 for gated experts, 1 for plain ones.
        itemsize: bytes of the dtype that rows are multiplied in.
        bits: stored bits a weight of gate_up and down.
        group: columns that share a scale, 0 for all of a row (and for dense weights).
    """

    num_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    halves: int
    itemsize: int
    bits: tuple[float, float]
    group: int = 0

    @property
    def num_pairs(self) -> int:
        """T * K."""
        return self.num_tokens * self.top_k

    @property
    def is_stepped(self) -> bool:
        """Whether a scale has at least the 64 columns of a short step, so that it meets the sum of each."""
        return self.group >= 64

    @property
    def has_small_groups(self) -> bool:
        """Whether scales of fewer columns than a step has meet the decoded weights, a tile of them at a time."""
        return 0 < self.group < 64

    @property
    def rows_per_expert(self) -> float:
        """Rows of an expert that has any, in the mean and at most."""
        return self.num_pairs / max(min(self.num_experts, self.num_pairs), 1)


@dataclass(frozen=True)
class Tile:
    """How one product is cut.

    Attributes:
        columns: rows of weights of a tile (gate and up both counted), a power of two from 16.
        depth: columns of weights that are loaded at once, a power of two from 32.
        warps: warps of a program.
        stages: loads in flight.
        swap: weights are the left operand.
        group: blocks that meet one column of weights before the next does.
        tensor_map: weights come through a tensor map (the hardware copies boxes) where they lie so that they can.
        arranged: rows come with their columns in the order in which weights are decoded (`triton_order`).
        registers: of a thread, as it was compiled, which say how many programs run at once; 0 where that is not known.
    """

    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    swap: bool = False
    group: int = 8
    tensor_map: bool = False
    arranged: bool = False
    registers: int = 0


@dataclass(frozen=True)
class Plan:
    """How one call walks its work; plans are equal where they compute alike.

    Attributes:
        strategy: "selective", "grouped" or "blockwise".
        reason: why.
        ordered: whether rows are ordered by expert first; else each pair is a block of its own.
        block: rows of a block.
        rows: rows of a tile, a power of two, at least `block`.
        gate_up, down: the two products.
        splits: pieces of the sum over I.
        wide: whether the pieces are float32 whatever x is.
        tails: how often a tile is halved where a block has no more rows than that.
    """

    strategy: str = field(compare=False)
    reason: str = field(compare=False)
    ordered: bool
    block: int
    rows: int
    gate_up: Tile
    down: Tile
    splits: int = 1
    wide: bool = True
    tails: int = 0

    def __str__(self) -> str:
        up, down = (f"{t.columns} x {t.depth}{' swapped' if t.swap else ''}" for t in (self.gate_up, self.down))
        ways = [f"{self.splits} pieces of the sum over I"] if self.splits > 1 else []
        lower = " and ".join(str(self.rows >> (i + 1)) for i in range(self.tails))
        ways += ["columns in the order of decoded weights"] if self.gate_up.arranged or self.down.arranged else []
        ways += [f"blocks of few rows in tiles of {lower}"] if lower else []
        return "; ".join([self.reason, f"rows x weights {self.rows} x {up} and {self.rows} x {down}", *ways])


def choose(problem: Problem, device: Device, strategy: tuple[str, int | None], invariant: bool) -> Plan:
    """The plan for a call; `strategy` is a name and a block size as `tuning.parse_strategy` returns them.

    Where a token's bits are to be `invariant` to its batch, tiles depend on neither T nor K.
    """
    name, block = strategy
    pairs, alone = problem.num_pairs, problem.num_tokens == 1
    if invariant:
        rows, reason = INVARIANT_ROWS, "torch.use_deterministic_algorithms(True): the same tiles for every batch"
    elif name in ("auto", "selective") and (alone or PAIRS_BETA * pairs <= problem.num_experts):
        few = "T = 1" if alone else f"{PAIRS_BETA} * T*K = {PAIRS_BETA * pairs} <= E = {problem.num_experts}"
        tiles = _tiles(problem, device, LEAST_ROWS)
        made = Plan("selective", f"{few}: each pair is a block, nothing is ordered", False, 1, LEAST_ROWS, *tiles)
        return _fill(made, problem, device)
    else:
        rows = LEAST_ROWS if name == "selective" else tile_rows(problem.rows_per_expert)
        rows = min(rows, STEPPED_ROWS) if _stays_low(problem, device) else rows
        reason = f"{problem.rows_per_expert:.3g} rows an expert, in tiles of {rows}"
    if name == "blockwise" and block is not None:
        block = min(block, MOST_ROWS)
        rows, reason = max(LEAST_ROWS, 1 << (block - 1).bit_length()), f"blocks of {block} rows, asked for"
    made = Plan("grouped", reason, True, block or rows, rows, *_tiles(problem, device, rows))
    if name != "auto":
        made = replace(made, strategy=name)
    if invariant:
        return made
    return _fill(made, problem, device) if rows < 64 else replace(made, tails=tails(rows, device), wide=False)


def _stays_low(problem: Problem, device: Device) -> bool:
    """Whether `STEPPED_ROWS` is the most."""
    return problem.is_stepped and (device.capability[0] != 9 or problem.itemsize == 1)


def tails(rows: int, device: Device) -> int:
    """How often the highest tiles are halved for blocks of few rows: to 64, and on other parts than Hopper to 32."""
    if rows < MOST_ROWS:
        return 0
    return 1 if device.capability[0] == 9 else 2


def tile_rows(rows_per_expert: float) -> int:
    """Rows of a tile for this many rows an expert: weights are read once for all of them, padding costs little."""
    for rows, most in ((16, 12), (32, 24), (64, 64)):
        if rows_per_expert <= most:
            return rows
    return MOST_ROWS


def _at_once(tile: Tile, rows: int, itemsize: int, bits: float, device: Device) -> int:
    """Programs that a multiprocessor holds."""
    by_memory = (device.shared_memory + _RESERVED) // (shared_bytes(tile, rows, itemsize, bits, device) + _RESERVED)
    return max(min(by_memory, _REGISTERS // (tile.warps * 32 * (tile.registers or _MOST_REGISTERS))), 1)


def _fill(plan: Plan, problem: Problem, device: Device) -> Plan:
    """The same with tiles, or pieces of the sum over I, for every multiprocessor, and enough of them on their way."""
    blocks, wanted = _blocks(problem), device.num_sms - device.num_sms // _IDLE
    gate_up = plan.gate_up
    tiles = blocks * -(-problem.halves * problem.intermediate_size // gate_up.columns)
    if tiles < wanted or _is_uneven(tiles, plan, device):
        gate_up = replace(gate_up, columns=min(gate_up.columns, LEAST_COLUMNS))
    most = max(min(-(-problem.intermediate_size // plan.down.depth) // 4, _MOST_SPLITS), 1)
    for columns in (plan.down.columns, min(plan.down.columns, LEAST_COLUMNS)):
        programs = max(blocks * -(-problem.hidden_size // columns), 1)
        splits = min(-(-wanted // programs), most)
        if programs * splits >= wanted:
            break
    if _is_uneven(programs * splits, plan, device):
        columns = min(columns, LEAST_COLUMNS)
    return _deepen(
        replace(plan, gate_up=gate_up, down=replace(plan.down, columns=columns), splits=splits), problem, device
    )


def outside_graphs(plan: Plan, problem: Problem) -> Plan:
    """The same for a call that no CUDA graph holds: nibbles come by pointers where there is little to read.

    The host makes tensor maps anew for each call, which took it 24 to 33 us on the machine of an H100. Tiles of many
    rows take longer than that in any case.
    """
    if plan.rows >= 64:
        return plan
    rows = {"gate_up": problem.halves, "down": 1}
    packed = {name: n * bits / 8 for (name, n), bits in zip(rows.items(), problem.bits, strict=True) if bits < 8}
    if _blocks(problem) * problem.hidden_size * problem.intermediate_size * sum(packed.values()) >= LEAST_MAPPED:
        return plan
    return replace(plan, **{name: replace(getattr(plan, name), tensor_map=False) for name in packed})


def _is_uneven(tiles: int, plan: Plan, device: Device) -> bool:
    """Whether some multiprocessors have so many tiles more than others that halves of them were faster on an H200."""
    each = -(-tiles // device.num_sms)
    few = device.capability[0] == 9 and plan.rows == LEAST_ROWS and each <= _FEW_TILES
    return few and _EVEN * each * device.num_sms > tiles


def _blocks(problem: Problem) -> int:
    return min(problem.num_pairs, problem.num_experts)


def _deepen(plan: Plan, problem: Problem, device: Device) -> Plan:
    """The same with so many loads on their way that each multiprocessor waits for `IN_FLIGHT` bytes of weights."""
    found, inner = [], problem.intermediate_size
    for tile, bits, outputs, steps in (
        (plan.gate_up, problem.bits[0], problem.halves * inner, -(-problem.hidden_size // plan.gate_up.depth)),
        (plan.down, problem.bits[1], problem.hidden_size * plan.splits, -(-inner // (plan.down.depth * plan.splits))),
    ):
        programs = _blocks(problem) * -(-outputs // tile.columns)
        ways = {}
        for stages in range(tile.stages, _MOST_STAGES + 1):
            way = replace(tile, stages=stages)
            if shared_bytes(way, plan.rows, problem.itemsize, bits, device) <= device.shared_memory:
                at_once = min(programs, device.num_sms * _at_once(way, plan.rows, problem.itemsize, bits, device))
                ways[way] = at_once * min(stages - 1, steps) * loaded_bytes(way, bits)
        enough = (way for way, loaded in ways.items() if loaded >= IN_FLIGHT * device.num_sms)
        found.append(next(enough, max(ways, key=lambda way: ways[way])))
    return replace(plan, gate_up=found[0], down=found[1])


def _tiles(problem: Problem, device: Device, rows: int) -> tuple[Tile, Tile]:
    hopper = device.capability[0] == 9 and problem.itemsize != 4
    inputs = problem.hidden_size, problem.intermediate_size
    tiles = [
        _on_hopper(problem, rows, bits, columns) if hopper else _elsewhere(problem, device, rows, bits)
        for bits, columns in zip(problem.bits, inputs, strict=True)
    ]
    gate_up, down = (
        fit(tile, rows, problem.itemsize, bits, device) for tile, bits in zip(tiles, problem.bits, strict=True)
    )
    return gate_up, down


def _on_hopper(problem: Problem, rows: int, bits: float, columns: int) -> Tile:
    """The tile of a product whose weights have so many bits and columns."""
    low, high = rows < 64, rows >= MOST_ROWS
    if problem.itemsize == 1:
        few = Tile(LEAST_COLUMNS, 128, 4, 4, swap=True, registers=72)
        if low:
            return few
        if high and not problem.is_stepped:
            return Tile(256, 128, 8, 4, tensor_map=True)
        return Tile(128, 128, 8 if high else 4, 3, tensor_map=True)
    if bits >= 16:
        few = Tile(128 if rows >= 32 else LEAST_COLUMNS, 128, 4, 4, swap=True)
        return few if low else Tile(256 if high else 128, 64, 8 if high else 4, 3, tensor_map=True)
    return _decoded_on_hopper(problem, rows, bits, columns)


def _decoded_on_hopper(problem: Problem, rows: int, bits: float, columns: int) -> Tile:
    """The same of weights that are decoded, for rows of 16 bits.

    The matrix instruction takes the left operand from registers, where weights are decoded, and wants 64 rows of it.
    For few rows and weights of 8 bits the instruction of parts before it is the faster one. Nibbles of many rows come
    through tensor maps where pointers would need masks.
    """
    low, high = rows < 64, rows >= MOST_ROWS
    if bits >= 8:
        if low:
            few = Tile(LEAST_COLUMNS, 128, 4, 4, registers=96)
            return few if rows < 32 else replace(few, columns=128, stages=3, registers=168)
        many = Tile(128, 64, 4, 4, swap=True, arranged=True)
        if problem.is_stepped:
            return replace(many, columns=64, depth=128, stages=3) if high else replace(many, stages=3)
        return many
    few = Tile(128, 128, 4, 3, swap=True, tensor_map=True, registers=160)
    if low:
        return few
    many = replace(few, arranged=True, registers=0)
    if high and problem.has_small_groups and bits > _LIGHT_SCALES:
        many = replace(many, depth=64, stages=4)
    elif high and problem.group >= 128:
        many = replace(many, columns=64)
    return replace(many, tensor_map=columns % many.depth != 0)


def _elsewhere(problem: Problem, device: Device, rows: int, bits: float) -> Tile:
    """The same for parts on which nothing was measured, and for rows of 32 bits."""
    crowded, packed = problem.is_stepped or problem.has_small_groups, min(problem.bits) < 16
    maps = device.capability >= (9, 0)
    if problem.itemsize == 4:
        swap = device.capability[0] == 9 and (rows < 64 or packed)
        return Tile(64, 32, 8 if rows >= MOST_ROWS else 4, 3, swap=swap)
    if rows < 64:
        wide = rows >= 32 and device.shared_memory > 128 << 10
        return Tile(128 if bits < 9 or wide else LEAST_COLUMNS, 128, 4, 4)
    if problem.itemsize == 1:  # rows and weights of 8 bits both reach the tensor cores as they are
        return Tile(64, 128, 8 if rows >= MOST_ROWS else 4, 4, tensor_map=maps)
    if rows >= MOST_ROWS:
        return Tile(64 if crowded else 128, 64, 8, 4, tensor_map=maps and not packed)
    return Tile(128, 64, 8 if crowded else 4, 4, tensor_map=maps and not packed)


def fit(tile: Tile, rows: int, itemsize: int, bits: float, device: Device) -> Tile:
    """The same tile with as many loads in flight as the device's shared memory holds, at least two."""
    while shared_bytes(tile, rows, itemsize, bits, device) > device.shared_memory:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.depth > 32:
            tile = replace(tile, depth=tile.depth // 2)
        else:
            tile = replace(tile, columns=tile.columns // 2)
    return tile


def loaded_bytes(tile: Tile, bits: float) -> int:
    """Weights that a program asks for at once, without their scales."""
    return tile.columns * tile.depth * int(bits) // 8


def shared_bytes(tile: Tile, rows: int, itemsize: int, bits: float, device: Device) -> int:
    """Shared memory of a program, at most: the rows and weights in flight, and weights decoded once where packed.

    In low tiles of 16-bit rows these go from the bytes in flight to registers and never back. Where both operands do,
    before Hopper and after it, the memory of a step is free when its product begins.
    """
    weights = tile.columns * tile.depth
    flight = rows * tile.depth * itemsize + int(weights * bits / 8)
    decoded = weights * itemsize if bits < 8 * itemsize and (rows >= 64 or itemsize == 4) else 0
    is_free = device.capability[0] != 9 and (rows < 64 or itemsize == 1)
    return max((tile.stages - is_free) * flight + decoded, rows * tile.columns * 4) + _EXCHANGED
