"""The part of ``_core`` for linear models (``core/bindings/linear.cpp``). The stub alone is in several."""

from collections.abc import Callable
from enum import Enum

class Damage(Enum):
    bad_label = ...
    bad_index = ...
    bad_value = ...
    not_finite = ...
    below_base = ...
    not_rising = ...
    beyond_32_bits = ...
    beyond_features = ...
    query_id = ...
    bad_weight = ...

class ParsedRows:
    rows: int
    entries: int
    lines: int
    features: int
    damaged: int
    weighted: bool
    complete: bool
    first_damaged: list[tuple[int, Damage, bytes]]

def whole_lines(text: int, size: int, begin: int, end: int) -> tuple[int, int]: ...
def libsvm_bounds(text: int, size: int) -> tuple[int, int]: ...

class RowsOut:
    def __init__(
        self,
        offsets: int,
        indices: int,
        values: int,
        labels: int,
        starts: int,
        weights: int,
        rows: int,
        entries: int,
    ) -> None: ...

class RowsView:
    def __init__(self, offsets: int, indices: int, values: int, rows: int, entries: int) -> None: ...

class ModelView:
    def __init__(self, weights: int, features: int, scale: float, bias: float) -> None: ...

def parse_libsvm(text: int, size: int, index_base: int, features: int, strict: bool, out: RowsOut) -> ParsedRows: ...

class Loss(Enum):
    logistic = ...
    hinge = ...
    squared_hinge = ...
    squared_error = ...

def score_rows(rows: RowsView, first: int, model: ModelView, scores: int, count: int) -> None: ...

class Numbering:
    size: int
    def __init__(self, indices: int, count: int, features: int) -> None: ...
    def write_features(self, out: int) -> None: ...
    def renumber(self, indices: int, out: int, count: int) -> None: ...

class Team:
    size: int
    def __init__(self, threads: int) -> None: ...

class BatchGradient:
    def __init__(self, features: int, team: Team) -> None: ...

class Rule(Enum):
    sgd = ...
    adagrad = ...

class Descent:
    bias: float
    bias_squares: float
    def __init__(
        self,
        features: int,
        rule: Rule,
        l1: float,
        l2: float,
        with_bias: bool,
        team: Team,
        numbering: Numbering | None,
    ) -> None: ...
    def step(self, indices: int, sums: int, count: int, slope: float, rate: float, rows: float) -> None: ...
    def step_alone(
        self, gradient: BatchGradient, rows: RowsView, targets: int, chosen: int, count: int, loss: Loss, rate: float
    ) -> tuple[float, int]: ...
    def write_weights(self, out: int, count: int) -> None: ...
    def settle(self) -> None: ...
    def write_squares(self, out: int, count: int) -> None: ...
    def restore(self, weights: int, squares: int, count: int, bias: float, bias_squares: float) -> None: ...

class RankGradient:
    def __init__(self, descent: Descent, numbering: Numbering | None, team: Team) -> None: ...
    def find(self, rows: RowsView, targets: int, chosen: int, count: int, loss: Loss) -> int: ...
    def take(self, indices: int, values: int, count: int) -> None: ...

class Columns:
    def __init__(self, rows: RowsView, chosen: int, count: int, features: int, team: Team) -> None: ...
    def write_offsets(self, out: int) -> None: ...
    def derivatives(
        self,
        block: int,
        count: int,
        scores: int,
        targets: int,
        rows: int,
        bias: float,
        loss: Loss,
        slopes: int,
        curvatures: int,
    ) -> None: ...
    def move(self, block: int, changes: int, count: int, scores: int, rows: int) -> None: ...

class NewtonStep:
    loss: float
    objective: float
    gap: float
    sums: int
    iterations: int
    converged: bool
    stuck: bool

class Newton:
    bias: float
    present_bias: float
    objective: float
    taken: bool
    dual_count: int
    def __init__(
        self,
        rows: RowsView,
        chosen: int,
        count: int,
        targets: int,
        row_weights: int,
        total_rows: int,
        features: int,
        classes: int,
        loss: Loss,
        l2: float,
        l1: float,
        with_bias: bool,
        tolerance: float,
        descends: bool,
        seed: int,
        total_features: int,
        counted: int,
        rank: int,
        ranks: int,
        team: Team,
        reduce: Callable[[int, int, int, bool], None],
    ) -> None: ...
    def step(self, last: bool = False) -> NewtonStep: ...
    def write_weights(self, out: int, count: int) -> None: ...
    def write_biases(self, out: int, count: int) -> None: ...
    def write_duals(self, out: int) -> None: ...
    def write_margins(self, duals: int, lacking: int, rows: int) -> None: ...
    def fix(self, moves: int, duals: int, scores: int, rows: int) -> float: ...
    def take(self, duals: int, rows: int) -> NewtonStep: ...
    def settle(self, ends: bool) -> None: ...
    def restore(self, weights: int, count: int, bias: float, duals: int, dual_count: int) -> None: ...

def descend_duals(
    rows: RowsView,
    targets: int,
    row_weights: int,
    scores: int,
    duals: int,
    features: int,
    l2: float,
    with_bias: bool,
    tolerance: float,
    seed: int,
    steps: int,
    bias: float,
    imbalance: float,
    objective: float,
    total_weight: float,
    look: Callable[[], None],
) -> float: ...
def sum_losses(scores: int, targets: int, rows: int, bias: float, loss: Loss) -> tuple[float, float]: ...
