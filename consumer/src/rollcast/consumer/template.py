"""Path templates of dumps: one name for each file of each rollout of each run."""

import re
from collections.abc import Callable
from pathlib import Path
from string import Formatter

from rollcast.consumer.errors import TemplateError
from rollcast.consumer.rollout import RolloutId, RolloutKey
from rollcast.consumer.streams import policy_loss_rank
from rollcast.schemas import file_name_for

POLICY_LOSS_FOLDER = "policy_loss_debug"
"""Name of the folder of a run's policy-loss calls."""

DUMP_SUFFIX = ".pt"
"""How the name of every dump ends, by which files without a manifest are taken for dumps."""

MANIFEST_SUFFIX = ".manifest.json"
"""What the name of a manifest adds to the name of its dump."""

TOMBSTONE_SUFFIX = ".removed.json"
"""What the name of a manifest adds once the retention has removed its dump."""

_NUMBERS = ("rollout_id", "rank", "attempt")
_IN_FILE_NAME = ("rank", "attempt")
_KNOWN = "{run_id}, {rollout_id}, {rank} and {attempt}"
_EXAMPLE = "for example 'dumps/{run_id}/{rollout_id}.pt'"
_EXAMPLE_BY_SHARD = "for example 'dumps/{run_id}/{rollout_id}_{rank}.pt'"
_WORDS = ("incomplete", "attempt-1", "unknown-0")
# Zeros keep a number a number, so that names stay distinct; 19 digits are those of the largest.
_PADDING = re.compile(r"0(?:[1-9]|1[0-9])d")
_Pieces = list[tuple[str, str | None, str | None, str | None]]
"""Text, and what follows it: the name of a placeholder, its format and its conversion; None at the end."""


class PathTemplate:
    """A path with `{run_id}` and, after it, `{rollout_id}`; its file name ends with `.pt`.

    The file name may have `{rank}` and `{attempt}` too. The rollout may be padded with zeros, `{rollout_id:06d}`; a
    larger number is as long as it is.

    That order makes names distinct: whatever a run id contains, the numbers after it can be told from the right. The
    folder does not depend on rank and attempt, so that one lock and one manifest stand for all files of a rollout.

    Args:
        template: the path.
        several_files: whether a dump is a file for each rank.

    Raises:
        TemplateError: two dumps could get one name, a placeholder is unknown, or the suffix is not that of dumps.
    """

    def __init__(self, template: str, *, several_files: bool = False) -> None:
        self.template = template
        self._pieces = _pieces_of(template)
        fields = [name for _, name, *_ in self._pieces if name is not None]
        self._several_attempts = "attempt" in fields
        for name in ("run_id", "rollout_id", *["rank"] * several_files):
            if name not in fields:
                raise TemplateError(
                    f"dump path {template!r} has no {{{name}}}, so dumps would overwrite each other; "
                    f"put {{{name}}} into it, {_EXAMPLE_BY_SHARD if name == 'rank' else _EXAMPLE}"
                )
        numbers = fields[fields.count("run_id") :]
        if "run_id" in numbers or len(set(numbers)) < len(numbers):
            raise TemplateError(
                f"dump path {template!r} needs one {{rollout_id}}, at most one {{rank}} and {{attempt}}, all of them "
                f"after {{run_id}}; {_EXAMPLE}"
            )
        folder = [name for _, name, *_ in _split(str(Path(template).parent))]
        for name in _IN_FILE_NAME:
            if name in folder:
                raise TemplateError(f"dump path {template!r} has {{{name}}} in a folder's name; put it into the file's")
        named = _with_dump_suffix(template)
        self._refuse_side_names(named)
        if named != template:
            raise TemplateError(f"dump path {template!r} does not end with {DUMP_SUFFIX}; write {named!r}")

    def path(self, rollout: RolloutId, rank: int) -> Path:
        """Returns the absolute path of the file of a complete dump; the run id is made safe as a file name.

        The dump of a policy-loss call is `policy_loss_debug/rank_<rank>_call_<number>.pt` beside the run's dumps.
        """
        return self._path(rollout.key, rank=str(rank), attempt=str(rollout.attempt))

    def base(self, rollout: RolloutId) -> Path:
        """Returns the path that names the manifest of all files of a dump: the word `rank` stands for each rank."""
        return self._path(rollout.key, rank="rank", attempt=str(rollout.attempt))

    def bases(self, key: RolloutKey, word: str | None = None) -> list[Path]:
        """Returns where a dump of this rollout can be found, with `word` before the suffix if one is given.

        There are several only if names have attempts. Any of them may be of something else: its manifest tells.
        """
        base = self._with(self.base(RolloutId(key.run_id, 0, key.rollout_id, key.stream)), word)
        if not self._several_attempts or policy_loss_rank(key.stream) is not None:
            return [base]
        pattern = self._with(Path(self._fill(key, rank="rank", attempt="*", literal=_glob_escape)), word).name
        found = {
            path.name.removesuffix(suffix)
            for suffix in (MANIFEST_SUFFIX, TOMBSTONE_SUFFIX)
            for path in base.parent.glob(pattern + suffix)
        }
        return [base.with_name(name) for name in sorted(found)]

    def beside(self, path: Path, word: str) -> Path:
        """Returns the name that a file or base has with this word before its suffix."""
        return path.with_name(f"{path.name.removesuffix(DUMP_SUFFIX)}.{word}{DUMP_SUFFIX}")

    def asides(self, base: Path) -> list[Path]:
        """Returns the bases of the older attempts of a dump that stand beside it."""
        pattern = self.beside(base.with_name(_glob_escape(base.name)), "attempt-*").name + MANIFEST_SUFFIX
        return [path.with_name(path.name.removesuffix(MANIFEST_SUFFIX)) for path in base.parent.glob(pattern)]

    def directories(self, run_id: str | None = None) -> list[Path]:
        """Returns the existing directories that can hold dumps of this template, of one run or of all."""
        dumps = self._dump_directories("*" if run_id is None else file_name_for(run_id))
        patterns = (POLICY_LOSS_FOLDER, f"*/{POLICY_LOSS_FOLDER}")
        return [*dumps, *(calls for path in dumps for pattern in patterns for calls in path.glob(pattern))]

    def _path(self, key: RolloutKey, *, rank: str, attempt: str) -> Path:
        path = Path(self._fill(key, rank=rank, attempt=attempt)).absolute()
        calling_rank = policy_loss_rank(key.stream)
        if calling_rank is None:
            return path
        # Where the runs share a folder, the calls of each get one of their own.
        runs_apart = "{run_id}" in str(Path(self.template).parent)
        folder = path.parent if runs_apart else path.parent / file_name_for(key.run_id)
        return folder / POLICY_LOSS_FOLDER / f"rank_{calling_rank}_call_{key.rollout_id}{DUMP_SUFFIX}"

    def _with(self, path: Path, word: str | None) -> Path:
        return path if word is None else self.beside(path, word)

    def _fill(self, key: RolloutKey, *, rank: str, attempt: str, literal: Callable[[str], str] = str) -> str:
        values = {
            "run_id": file_name_for(key.run_id),
            "rollout_id": key.rollout_id,
            "rank": rank,
            "attempt": attempt,
        }
        return "".join(
            literal(text) + (format(values[name], spec or "") if name else "") for text, name, spec, _ in self._pieces
        )

    def _dump_directories(self, run_id: str) -> list[Path]:
        directory = Path(self.template).parent
        fixed = Path(directory.anchor)
        parts = directory.parts[1:] if directory.anchor else directory.parts
        pattern: list[str] = []
        for part in parts:
            if pattern or "{" in part:
                stands_for = {"run_id": run_id, "rollout_id": "*", None: ""}
                pattern.append("".join(_glob_escape(text) + stands_for[name] for text, name, *_ in _split(part)))
            else:
                fixed /= part
        found = fixed.glob("/".join(pattern)) if pattern else [fixed]
        return [path for path in found if path.is_dir()]

    def _refuse_side_names(self, named: str) -> None:
        """Refuses a template with which the name of a file beside a dump could be that of another rollout's dump."""
        name = Path(named).name
        any_run = ".+"
        pattern = "".join(
            re.escape(text) + (any_run if field == "run_id" else r"-?\d+" if field else "")
            for text, field, *_ in _split(name)
        )
        example = "".join(text + ("7" if field else "") for text, field, *_ in _split(name))
        dump = Path(named).with_name(example)
        for word in _WORDS:
            beside = self.beside(dump, word).name
            for side in (beside, beside + MANIFEST_SUFFIX, example + MANIFEST_SUFFIX, example + TOMBSTONE_SUFFIX):
                if re.fullmatch(pattern, side):
                    raise TemplateError(
                        f"dump path {self.template!r} lets the file {side!r} beside one dump pass for the dump of "
                        f"another run; give each run a folder, {_EXAMPLE}"
                    )


def _pieces_of(template: str) -> _Pieces:
    try:
        pieces = _split(template)
    except ValueError as exc:
        raise TemplateError(f"dump path {template!r} is not a template: {exc}; {_EXAMPLE}") from exc
    for index, (text, name, spec, conversion) in enumerate(pieces):
        if name is None:
            continue
        if name not in ("run_id", *_NUMBERS):
            raise TemplateError(f"dump path {template!r} has an unknown placeholder {name!r}; known are {_KNOWN}")
        if conversion or (spec and not (name == "rollout_id" and _PADDING.fullmatch(spec))):
            shown = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            raise TemplateError(
                f"dump path {template!r} has {{{shown}}}, a format that cannot be used; write {{{name}}}, or pad the "
                "rollout with zeros to 1 to 19 digits, {rollout_id:06d}"
            )
        if index and not text.strip("0123456789"):
            raise TemplateError(
                f"dump path {template!r} has nothing but digits between two placeholders, so that two rollouts could "
                f"get one name; separate them, {_EXAMPLE}"
            )
    return pieces


def _with_dump_suffix(template: str) -> str:
    """Returns the template, with the suffix of dumps in place of a wrong one, or added where it has none."""
    if template.endswith(DUMP_SUFFIX):
        return template
    bare = template.rstrip("/")
    suffix = Path(bare).suffix
    return (bare if "{" in suffix else bare.removesuffix(suffix)) + DUMP_SUFFIX


def _split(text: str) -> _Pieces:
    return list(Formatter().parse(text))


def _glob_escape(text: str) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in text)
