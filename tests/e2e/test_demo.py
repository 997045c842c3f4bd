"""The whole pipeline on eight real ranks and a real Kafka: the demo as a user runs it, and Kafka killed under it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

from fixtures.waiting import wait_until
from rollcast.consumer.broker import Broker, JvmBroker
from rollcast_demo.compare import DumpPair, await_dumps, compare
from rollcast_demo.config import Event, TrainerConfig
from rollcast_demo.daemon import running_daemon
from rollcast_demo.launch import run_trainers
from rollcast_demo.layout import LAYOUTS

pytestmark = pytest.mark.timeout(400)

_ROOT = Path(__file__).parents[2]


def test_the_demo_verifies_every_dump_of_both_layouts(broker: Broker, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "rollcast_demo", f"--output={output}", f"--bootstrap={broker.bootstrap_servers}"],
        env={**os.environ, "PYTHONPATH": str(_ROOT / "deploy" / "local")},
        capture_output=True,
        text=True,
        check=False,
        timeout=360,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 of 12 dumps that came through Kafka are bit-equal" in done.stdout
    dumps = sorted((output / "dumps").glob("*/*.pt"))
    assert len(dumps) == 12
    for path in dumps:
        payload = torch.load(path, weights_only=True)
        masks = [sample["loss_masks"] for sample in payload["samples"]]
        assert payload["format_version"] == 2
        assert any(not mask.any() for mask in masks), "no fully masked sample"
        assert any(sample["truncated"] for sample in payload["samples"]), "no truncated sample"
        rollouts = [sample["rollout_ids"] for sample in payload["samples"]]
        assert len(set(rollouts)) < len(rollouts), "no rollout of several samples"
    assert not list(output.rglob("*.tmp"))


def test_ctrl_c_while_the_ranks_start_is_one_line_and_leaves_no_process(broker: Broker, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollcast_demo", f"--output={tmp_path}", f"--bootstrap={broker.bootstrap_servers}"]
    demo = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    children: list[psutil.Process] = []

    def is_importing() -> bool:
        children[:] = psutil.Process(demo.pid).children(recursive=True)
        # What is imported runs short-lived processes of its own.
        with contextlib.suppress(psutil.NoSuchProcess):
            return any("multiprocessing.forkserver" in " ".join(child.cmdline()) for child in children)
        return False

    try:
        wait_until(is_importing)
        # To all of them, as a terminal does.
        os.killpg(demo.pid, signal.SIGINT)
        told, _ = demo.communicate(timeout=60)
    except BaseException:
        os.killpg(demo.pid, signal.SIGKILL)
        raise
    first, *others = told.splitlines()
    assert first.startswith("Kafka at ")
    assert (demo.returncode, others) == (130, ["Stopped."])
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_a_kafka_killed_and_restarted_in_mid_run_loses_nothing(own_broker: JvmBroker, tmp_path: Path) -> None:
    layout = LAYOUTS[-1]
    config = TrainerConfig(
        output_dir=tmp_path, bootstrap_servers=own_broker.bootstrap_servers, layouts=(layout,), rollouts=6
    )
    run_id = config.run_id(layout)
    template = str(tmp_path / "dumps" / "{run_id}" / "{rollout_id}.pt")
    pairs = [
        DumpPair(
            run_id=run_id,
            rollout_id=rollout_id,
            through_kafka=Path(template.format(run_id=run_id, rollout_id=rollout_id)),
            inline=Path(config.inline_template.format(run_id=run_id, rollout_id=rollout_id)),
        )
        for rollout_id in range(config.rollouts)
    ]
    restart = threading.Thread(target=own_broker.start)

    def kill_and_restart(event: Event) -> None:
        if (event.kind, event.rank) == ("rollout", 0):
            if event.rollout_id == 1:
                own_broker.kill()
            elif event.rollout_id == 4:
                restart.start()

    with running_daemon(
        bootstrap_servers=own_broker.bootstrap_servers,
        topic_prefix="rollcast",
        dump_template=template,
        log_path=tmp_path / "daemon.log",
    ) as daemon:
        reports = run_trainers(config, on_event=kill_and_restart, watch=daemon.check)
        restart.join()
        await_dumps(pairs, daemon, timeout_s=90, on_count=lambda _: None)
    assert not reports[0].problems
    for pair in pairs:
        verdict = compare(pair)
        assert verdict.good, verdict
