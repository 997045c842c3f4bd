"""Configuration of the trainers, and what they report while they run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rollcast_demo.layout import LAYOUTS, Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """What the eight ranks do.

    Attributes:
        output_dir: Folder of everything they write, an absolute path.
        bootstrap_servers: Kafka addresses for the publisher.
        topic_prefix: First part of the topic names.
        rollouts: Rollouts of each layout.
        layouts: Parallel layouts, one training run each, one after the other in the same processes.
        seed: Seed of weights, warm-up and sampling.
        warm_up_steps: Supervised steps before the first rollout.
        learning_rate: Learning rate of the policy gradient.
        close_timeout_s: How long `close` waits for the delivery of what is still in the spool.
        timeout_s: Bound of the whole training; a hang ends here.
    """

    output_dir: Path
    bootstrap_servers: str
    topic_prefix: str = "rollcast"
    rollouts: int = 6
    layouts: tuple[Layout, ...] = LAYOUTS
    seed: int = 0
    warm_up_steps: int = 100
    learning_rate: float = 1e-3
    close_timeout_s: float = 60.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.rollouts < 1:
            raise ValueError(f"rollouts is {self.rollouts}; give a number of at least 1")
        if not self.output_dir.is_absolute():
            raise ValueError(f"output_dir is {self.output_dir}; give an absolute path")

    @property
    def spool_dir(self) -> Path:
        """Folder of the bundles that wait for Kafka."""
        return self.output_dir / "spool"

    @property
    def log_dir(self) -> Path:
        """Folder of one log for each rank."""
        return self.output_dir / "logs"

    @property
    def inline_template(self) -> str:
        """Path template of the dumps of the inline path, with `{run_id}` and `{rollout_id}`."""
        return str(self.output_dir / "inline" / "{run_id}" / "{rollout_id}.pt")

    def run_id(self, layout: Layout) -> str:
        """Return the run id of a layout."""
        return f"demo-{layout.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What a rank tells the launcher.

    Attributes:
        kind: `ready` when a run's groups and publisher are up, `rollout` after each rollout, `closed` at its end.
        rank: Global rank.
        run_id: The run it is about.
        rollout_id: The rollout it is about, for kind `rollout`.
        problem: Why the rollout was not published, or that not all was delivered when the publisher closed.
        numbers: `rollout` has `reward`, `samples`, `truncated`, `masked`, `shared` (samples beyond the first of
            their rollout), `empty_spans`, `inline_s` and `publish_s`; `closed` has `close_s`.
    """

    kind: Literal["ready", "rollout", "closed"]
    rank: int
    run_id: str
    rollout_id: int = -1
    problem: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)
