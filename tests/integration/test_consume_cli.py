"""The `rollcast` command: one sentence for each trouble, and what a person sees."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import aiohttp
import pytest
import torch
from aiokafka import AIOKafkaProducer
from typer.core import TyperGroup
from typer.main import get_command

from fixtures.command import command, one_sentence
from fixtures.frames import frames_of
from fixtures.installation import Installation, keyed, shards
from fixtures.topic import read_until
from rollcast.consumer.broker import Broker
from rollcast.consumer.cli.command import app
from rollcast.schemas import record_key

NOBODY = "127.0.0.1:9"
CONSUME = ["--bootstrap", NOBODY, "--dump-path", "{run_id}/{rollout_id}.pt"]


@pytest.mark.parametrize(
    ("hidden", "arguments", "name", "extra"),
    [
        ("typer", ["diff"], "rollcast diff", "consumer"),
        ("typer", [], "rollcast", "consumer"),
        ("typer", ["broker"], "rollcast broker", "broker"),
        ("torch", ["inspect", "a.pt"], "rollcast inspect", "consumer"),
        ("torch", ["diff", "a.pt", "b.pt"], "rollcast diff", "consumer"),
        ("rich", ["inspect", "a.pt"], "rollcast inspect", "consumer"),
        ("torch", ["verify", "a.pt"], "rollcast verify", "consumer"),
        (
            "aiokafka",
            ["rebuild", *CONSUME, "--run", "a", "--rollout", "1"],
            "rollcast rebuild",
            "consumer",
        ),
        ("torch", ["consume", *CONSUME], "rollcast consume", "consumer"),
        ("aiokafka", ["consume", *CONSUME], "rollcast consume", "consumer"),
    ],
)
def test_a_missing_extra_is_one_sentence_with_the_way_that_the_readme_installs_it(
    tmp_path: Path, hidden: str, arguments: Sequence[str], name: str, extra: str
) -> None:
    for file in ("a.pt", "b.pt"):
        (tmp_path / file).write_bytes(b"PK\x03\x04")
    done = _run_without(hidden, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    way = f"pip install -c constraints.txt '.[{extra}]' in a clone of Rollcast"
    assert done.stderr.splitlines()[-1] == f"{name} needs {hidden}: {way}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["inspect", "absent.pt"], ["diff", "absent.pt", "absent.pt"]])
def test_a_mistyped_name_is_told_before_torch_is_loaded(tmp_path: Path, arguments: Sequence[str]) -> None:
    done = _run_without("torch", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "rollcast: absent.pt cannot be read: No such file or directory\n")


@pytest.mark.parametrize(
    "arguments", [["consume", *CONSUME[:-1]], ["rebuild", "--run", "a", "--rollout", "1", *CONSUME[:-1]]]
)
def test_a_path_that_no_dump_can_have_is_told_before_torch_is_loaded(tmp_path: Path, arguments: Sequence[str]) -> None:
    done = _run_without("torch", *arguments, "{rollout_id}.pt", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "dump path '{rollout_id}.pt' has no {run_id}" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--version"], *([name, "--help"] for name in ("consume", "inspect", "diff", "verify", "rebuild", "broker"))],
)
def test_help_and_version_need_neither_torch_nor_numpy(tmp_path: Path, arguments: Sequence[str]) -> None:
    for hidden in ("torch", "numpy"):
        done = _run_without(hidden, *arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")


def _run_without(hidden: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs `rollcast ARGUMENTS` where a package is not installed."""
    program = f"import sys; sys.modules[{hidden!r}] = None; from rollcast.consumer.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("subcommand", ["consume", "inspect", "diff", "verify", "rebuild", "broker"])
def test_help_has_every_option_whole_on_80_columns(
    subcommand: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    of_app = get_command(app)
    assert isinstance(of_app, TyperGroup)
    names = [name for parameter in of_app.commands[subcommand].params for name in parameter.opts]

    assert command(monkeypatch, subcommand, "--help") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert [name for name in names if name.startswith("--") and name not in shown] == []


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"rollcast {version('rollcast')}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--bootstrap", NOBODY, "--dump-path", "{run_id}.pt"], "has no {rollout_id}"),
        (["--bootstrap", NOBODY, "--dump-path", "{rollout_id}.pt"], "has no {run_id}"),
        (["--bootstrap", NOBODY, "--dump-path", "{run_id}/{rollout_id}"], "write '{run_id}/{rollout_id}.pt'"),
        (["--bootstrap", "a:b", "--dump-path", "{tmp}/{run_id}/{rollout_id}.pt"], "'a:b' is no host:port"),
        (["--bootstrap", "kafka", "--dump-path", "{tmp}/{run_id}/{rollout_id}.pt"], "'kafka' is no host:port"),
        (["--bootstrap", NOBODY, "--dump-path", "/proc/none/{run_id}/{rollout_id}.pt"], "another one with --dump-path"),
        (
            ["--bootstrap", NOBODY, "--dump-path", "{tmp}/notes/{run_id}/{rollout_id}.pt"],
            "/notes is a file and not a folder; move it away, or give another folder with --dump-path",
        ),
        (
            ["--bootstrap", NOBODY, "--dump-path", "{tmp}/notes/below/{run_id}/{rollout_id}.pt"],
            "/notes is a file and not a folder; move it away, or give another folder with --dump-path",
        ),
        (
            ["--bootstrap", NOBODY, "--dump-path", "{tmp}/{run_id}/{rollout_id}.pt", "--scratch-dir", "{tmp}/notes"],
            "/notes is a file and not a folder; move it away, or give another folder with --scratch-dir",
        ),
        (
            ["--bootstrap", NOBODY, "--dump-path", "{tmp}/{run_id}/{rollout_id}.pt"],
            f"no Kafka broker answers at {NOBODY}",
        ),
        (
            ["--bootstrap", NOBODY, "--dump-path", "{run_id}/{rollout_id}.pt", "--topic-prefix", "a b"],
            "topic prefix 'a b'",
        ),
        (
            ["--bootstrap", NOBODY, "--dump-path", "{run_id}/{rollout_id}.pt", "--incomplete-after-s", "-1"],
            "incomplete_after_s (--incomplete-after-s) is -1.0; it must be above 0",
        ),
        (
            ["--bootstrap", NOBODY, "--dump-path", "{run_id}/{rollout_id}.pt", "--layout", "miles"],
            "has no {rank}, so dumps would overwrite each other",
        ),
        (
            ["--bootstrap", NOBODY, "--dump-path", "{run_id}/{rollout_id}.pt", "--pin", "7"],
            "exceptions from keep_last (--keep-last)",
        ),
        (
            ["--bootstrap", NOBODY, "--dump-path", "{run_id}/{rollout_id}.pt", "--stall-after-s", "0"],
            "stall_after_s (--stall-after-s) is 0.0; it must be above 0",
        ),
    ],
)
def test_what_cannot_work_is_one_sentence_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").touch()
    given = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]

    assert command(monkeypatch, "consume", "--connect-timeout-s", "1", *given) == 2
    assert sentence in one_sentence(capsys)


@pytest.mark.parametrize("rollout", ["x", "7..", "7..6", "1..100001", "-1", "1.5"])
def test_a_rollout_that_is_no_number_and_no_range_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rollout: str
) -> None:
    assert command(monkeypatch, "rebuild", *CONSUME, "--run", "a", "--rollout", rollout) == 2
    told = capsys.readouterr().err
    assert "use 7 or 7..12" in told
    assert "Invalid value for --rollout" in told


def test_an_unknown_log_level_is_refused_with_the_name_of_its_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "consume", *CONSUME, "--log-level", "loud") == 2
    assert "Invalid value for --log-level: 'loud'" in capsys.readouterr().err


def test_a_rebuild_into_a_folder_that_cannot_be_made_is_one_sentence_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--bootstrap", NOBODY, "--dump-path", "/proc/none/{run_id}/{rollout_id}.pt", "--run", "a"]

    assert command(monkeypatch, "rebuild", *arguments, "--rollout", "1") == 2
    assert "give another one with --dump-path or --scratch-dir" in one_sentence(capsys)


def test_a_rebuild_from_an_address_without_a_port_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--bootstrap", "kafka", "--dump-path", "{run_id}/{rollout_id}.pt", "--run", "a", "--rollout", "1"]

    assert command(monkeypatch, "rebuild", *arguments) == 2
    assert "'kafka' is no host:port" in one_sentence(capsys)


def test_missing_topics_that_may_not_be_created_are_one_sentence(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    arguments = ["--bootstrap", broker.bootstrap_servers, "--dump-path", f"{tmp_path}/{{run_id}}/{{rollout_id}}.pt"]

    assert command(monkeypatch, "consume", *arguments, "--no-create-topics", "--topic-prefix", prefix) == 2
    assert f"4 topics missing at {broker.bootstrap_servers}: {prefix}.records, {prefix}.metrics" in one_sentence(capsys)


@asynccontextmanager
async def daemon_process(*arguments: str, bootstrap_servers: str | None = None) -> AsyncIterator[Process]:
    """Yields `rollcast consume` in a process of its own, with that address in its environment; none is left."""
    named = {} if bootstrap_servers is None else {"ROLLCAST_BOOTSTRAP_SERVERS": bootstrap_servers}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollcast.consumer.cli", "consume", *arguments),
        env={**os.environ, **named},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def log_to_its_end(process: Process) -> str:
    """Stops a daemon by SIGTERM; returns what it wrote since it was last read."""
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        return (await process.communicate())[1].decode()


async def test_the_daemon_in_its_own_process_writes_a_dump_and_stops_on_sigterm(broker: Broker, tmp_path: Path) -> None:
    prefix = f"test-{uuid.uuid4().hex[:12]}"
    async with daemon_process(
        *("--dump-path", f"{tmp_path}/{{run_id}}/{{rollout_id}}.pt"),
        *("--topic-prefix", prefix, "--group", prefix, "--http-port", "0"),
        bootstrap_servers=broker.bootstrap_servers,
    ) as process:
        assert process.stderr is not None
        read_line = process.stderr.readline
        while not (served := re.search(rb"metrics and health at (http://127.0.0.1:[0-9]+)", line := await read_line())):
            assert line, "the daemon ended"
        while b"assigned partitions" not in (line := await read_line()):
            assert line, "the daemon ended"
        producer = AIOKafkaProducer(bootstrap_servers=broker.bootstrap_servers)
        await producer.start()
        for frame in frames_of("../../etc/x", 1, 4, shards(4)):
            await producer.send(f"{prefix}.records", frame, key=record_key("../../etc/x", 4))
        await producer.stop()
        await read_until(broker.bootstrap_servers, f"{prefix}.dumps", lambda events: len(events) == 1)
        async with aiohttp.ClientSession(served[1].decode()) as session, session.get("/healthz") as response:
            assert (response.status, await response.text()) == (200, "ok\n")
        log = await log_to_its_end(process)

    assert process.returncode == 0
    assert "6 samples in 8 parts" in log
    assert "SIGTERM: stopping" in log
    (dump,) = tmp_path.rglob("*.pt")
    assert dump.parent.parent == tmp_path
    assert torch.load(dump, weights_only=True)["rollout_id"] == 4


async def test_samples_without_an_order_are_told_once_a_run_and_not_with_every_rollout(installed: Installation) -> None:
    rollouts = [("a", 0), ("a", 1), ("b", 0), ("a", 2), ("b", 1)]
    for run_id, rollout_id in rollouts:
        sources = [
            replace(source, rollout_data={**source.rollout_data, "partition": None}) for source in shards(rollout_id)
        ]
        await installed.send(keyed(run_id, rollout_id, frames_of(run_id, 1, rollout_id, sources)))
    config = installed.config
    async with daemon_process(
        *("--bootstrap", config.bootstrap_servers, "--dump-path", config.dump_path),
        *("--topic-prefix", config.group_id, "--group", config.group_id),
    ) as process:
        await installed.dumps(len(rollouts))
        log = await log_to_its_end(process)

    told = re.findall(r"run '(.)' rollout \d+: not every sample has a rollout_position", log)
    assert sorted(told) == ["a", "b"]


async def test_a_signal_while_the_daemon_still_starts_is_a_graceful_stop(tmp_path: Path) -> None:
    path = f"{tmp_path}/{{run_id}}/{{rollout_id}}.pt"
    async with daemon_process("--bootstrap", NOBODY, "--dump-path", path) as process:
        assert process.stderr is not None
        assert b"starting" in await process.stderr.readline()
        log = await log_to_its_end(process)

    assert process.returncode == 0, log
    assert "stopping" in log


@pytest.mark.parametrize("level", ["info", "debug"])
def test_what_the_kafka_client_says_of_an_unreachable_broker_is_shown_when_debugging_alone(
    level: str, tmp_path: Path
) -> None:
    options = [
        "--bootstrap=127.0.0.1:1",
        f"--dump-path={tmp_path}/{{run_id}}/{{rollout_id}}.pt",
        "--connect-timeout-s=0.5",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "rollcast.consumer.cli", "consume", *options, f"--log-level={level}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert ("aiokafka" in done.stderr) == (level == "debug")
