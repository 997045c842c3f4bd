"""Path templates of dumps: one name for each rollout of each run."""

from pathlib import Path
from string import Formatter

from rollcast.consumer.errors import TemplateError
from rollcast.consumer.rollout import RolloutKey
from rollcast.consumer.streams import policy_loss_rank
from rollcast.schemas import file_name_for

POLICY_LOSS_FOLDER = "policy_loss_debug"
"""Name of the folder of a run's policy-loss calls."""

_PLACEHOLDERS = ("run_id", "rollout_id")
_EXAMPLE = "for example 'dumps/{run_id}/{rollout_id}.pt'"


class PathTemplate:
    """A path with `{run_id}` and, after it, `{rollout_id}`.

    That order makes names distinct: whatever a run id contains, what follows its last separator is the rollout id.

    Raises:
        TemplateError: two rollouts could get one name, or a placeholder is unknown.
    """

    def __init__(self, template: str) -> None:
        self.template = template
        fields = _fields(template)
        for name in _PLACEHOLDERS:
            if name not in fields:
                raise TemplateError(
                    f"dump path {template!r} has no {{{name}}}, so dumps would overwrite each other; "
                    f"put {{{name}}} into it, {_EXAMPLE}"
                )
        if fields[-1] != "rollout_id" or fields.count("rollout_id") > 1:
            raise TemplateError(f"dump path {template!r} needs one {{rollout_id}}, after {{run_id}}; {_EXAMPLE}")

    def path(self, key: RolloutKey) -> Path:
        """Returns the absolute path of a dump; the run id is made safe as a file name.

        The dump of a policy-loss call is `policy_loss_debug/rank_<rank>_call_<number>.pt` beside the run's dumps.
        """
        run_id = file_name_for(key.run_id)
        path = Path(self.template.format(run_id=run_id, rollout_id=key.rollout_id)).absolute()
        rank = policy_loss_rank(key.stream)
        if rank is None:
            return path
        # Where the runs share a folder, the calls of each get one of their own.
        runs_apart = "{run_id}" in str(Path(self.template).parent)
        folder = path.parent if runs_apart else path.parent / run_id
        return folder / POLICY_LOSS_FOLDER / f"rank_{rank}_call_{key.rollout_id}.pt"

    def directories(self) -> list[Path]:
        """Returns the existing directories that can hold dumps of this template."""
        dumps = self._dump_directories()
        patterns = (POLICY_LOSS_FOLDER, f"*/{POLICY_LOSS_FOLDER}")
        return [*dumps, *(calls for path in dumps for pattern in patterns for calls in path.glob(pattern))]

    def _dump_directories(self) -> list[Path]:
        directory = Path(self.template).parent
        fixed = Path(directory.anchor)
        parts = directory.parts[1:] if directory.anchor else directory.parts
        pattern: list[str] = []
        for part in parts:
            if pattern or "{" in part:
                pattern.append("".join(_glob_escape(text) + ("*" if name else "") for text, name in _pieces(part)))
            else:
                fixed /= part
        found = fixed.glob("/".join(pattern)) if pattern else [fixed]
        return [path for path in found if path.is_dir()]


def _fields(template: str) -> list[str]:
    fields: list[str] = []
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as exc:
        raise TemplateError(f"dump path {template!r} is not a template: {exc}; {_EXAMPLE}") from exc
    for index, (text, name, spec, conversion) in enumerate(pieces):
        if name is None:
            continue
        if name not in _PLACEHOLDERS or spec or conversion:
            raise TemplateError(
                f"dump path {template!r} has an unknown placeholder {name!r}; known are {{run_id}} and {{rollout_id}}"
            )
        if index and not text.strip("0123456789"):
            raise TemplateError(
                f"dump path {template!r} has nothing but digits between two placeholders, so that two rollouts could "
                f"get one name; separate them, {_EXAMPLE}"
            )
        fields.append(name)
    return fields


def _pieces(text: str) -> list[tuple[str, str | None]]:
    return [(literal, name) for literal, name, _, _ in Formatter().parse(text)]


def _glob_escape(text: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in text)
