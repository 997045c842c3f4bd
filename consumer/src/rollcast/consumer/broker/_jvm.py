"""Apache Kafka itself on a JVM: one KRaft node on the loopback address."""

from __future__ import annotations

import atexit
import base64
import contextlib
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from rollcast.consumer.broker._config import LOOPBACK, BrokerConfig, single_node_properties
from rollcast.consumer.broker._jars import KAFKA_VERSION, kafka_jars
from rollcast.consumer.broker._java import find_java
from rollcast.consumer.broker._ports import free_ports, kafka_answers, port_is_free
from rollcast.consumer.broker.errors import (
    BrokerError,
    BrokerExitedError,
    BrokerStartError,
    DataFolderTakenError,
    PortTakenError,
    with_log,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Self

_logger = logging.getLogger(__name__)
_DEFAULT_CONFIG: Final = BrokerConfig()
_STOP_TIMEOUT_S: Final = 20.0
_PROBE_INTERVAL_S: Final = 0.1
_LAST_LINES: Final = 15
_LOCK_NAME: Final = "broker.lock"
_GUARD: Final = Path(__file__).with_name("_guard.py")

# C1 code alone and the serial collector: half the start time on two cores, and a Kafka that mostly moves bytes
# between files and sockets loses little by it.
_JVM_OPTIONS: Final = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.net.preferIPv4Stack=true",
    "-Djava.awt.headless=true",
    "-Dlog4j2.configurationFile=log4j2.properties",
)

# To standard output, which is the log file: crash messages of the JVM then stand in the same file.
_LOG4J2_PROPERTIES: Final = """\
status = warn
appender.log.type = Console
appender.log.name = log
appender.log.layout.type = PatternLayout
appender.log.layout.pattern = %d{ISO8601} %-5p [%t] %c{2}: %m%n
rootLogger.level = info
rootLogger.appenderRef.log.ref = log
# Prints every setting, hundreds of lines, at each start.
logger.settings.name = org.apache.kafka.common.config
logger.settings.level = warn
"""


class JvmBroker:
    """A Kafka of its own on a JVM, listening on 127.0.0.1 only.

    `start()` returns when clients are answered. `stop()` and `kill()` may be called at any time and more than
    once; `start()` after either comes back on the same port with the same records, except that `stop()` removes
    a temporary data folder. The JVM ends with this process, even if this process is killed.

    Not safe for use by several threads at once. All methods block: call them from a thread in async code.

    Args:
        config: port, folder, memory and Kafka properties.
        report: takes lines about what is going on, for a person.
    """

    kind: Literal["jvm"] = "jvm"

    def __init__(self, config: BrokerConfig = _DEFAULT_CONFIG, *, report: Callable[[str], None] = _logger.info) -> None:
        self._config = config
        self._report = report
        self._port = config.port
        self._data_dir = config.data_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._starter_pid = os.getpid()

    @property
    def bootstrap_servers(self) -> str:
        """Address for clients, `127.0.0.1:PORT`.

        Raises:
            BrokerError: the broker was never started, so it has no port yet.
        """
        if self._port is None:
            raise BrokerError("this broker has no address before its first start; call start()")
        return f"{LOOPBACK}:{self._port}"

    @property
    def description(self) -> str:
        """What this broker is, in words."""
        return f"Apache Kafka {KAFKA_VERSION} on a JVM"

    @property
    def log_path(self) -> Path:
        """Kafka's own log and everything its JVM printed.

        Raises:
            BrokerError: there is no data folder yet, or no longer.
        """
        return self._folder() / "broker.log"

    @property
    def pid(self) -> int | None:
        """Process id of the JVM; None when it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the broker and returns when it answers clients; does nothing when it runs.

        Raises:
            JavaNotFoundError: no Java of version 17 or newer.
            BrokerExtraMissingError: Kafka's jars are not in the cache and `jgo` is not installed.
            JarDownloadError: they cannot be fetched.
            PortTakenError: somebody else listens on the port.
            DataFolderTakenError: another broker keeps its records in the data folder; nothing in it was changed.
            BrokerStartError: Kafka ended, or did not answer within `start_timeout_s`.
            BrokerError: the data folder cannot be written.
        """
        if self.pid is not None:
            return
        self._reap()
        if self._port is not None and not port_is_free(self._port):
            raise PortTakenError(self._port)
        java = [str(find_java()), f"-Xmx{self._config.heap_mb}m", *_JVM_OPTIONS]
        java += ["-cp", os.pathsep.join(str(jar) for jar in kafka_jars(self._report))]
        try:
            with self._locked_folder() as lock:
                port = self._write_settings()
                self._report(f"Starting {self.description}; its log is {self.log_path}")
                self._format_storage(java)
                process = self._launch([*java, "kafka.Kafka", "server.properties"], lock)
            self._await_answer(process, port)
        except OSError as error:
            folder = self._data_dir
            self._give_up()
            raise BrokerError(
                f"the broker cannot be set up in {folder or tempfile.gettempdir()}: {error}; choose another data folder"
            ) from error
        except BaseException:
            self._give_up()
            raise

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Ends the broker in order: SIGTERM, and SIGKILL after `timeout_s`; removes a temporary data folder."""
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                _logger.warning("Kafka (pid %d) did not stop within %.1f s; killing it", process.pid, timeout_s)
            finally:  # also when an impatient signal breaks the wait
                self.kill()
        self._remove_temporary_folder()

    def kill(self) -> None:
        """Ends the broker at once with SIGKILL, as a crash would; the data folder stays as it is."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def wait(self) -> None:
        """Blocks until the broker ends without having been asked to; a signal handler may break it.

        Raises:
            BrokerExitedError: it ended.
            BrokerError: it was not running to begin with.
        """
        if self._process is None:
            raise BrokerError("this broker does not run, so its end cannot be awaited; call start() first")
        status = self._process.wait()
        what = f"Kafka ended by itself with status {status}"
        raise BrokerExitedError(with_log(what, self.log_path, self._last_lines()))

    def _folder(self) -> Path:
        if self._data_dir is None:
            raise BrokerError("this broker has no data folder while it is stopped; call start()")
        return self._data_dir

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[int]:
        """Makes the data folder and yields the descriptor of its lock; a JVM that inherits it holds it until it ends.

        Raises:
            DataFolderTakenError: another broker holds it.
        """
        if self._data_dir is None:
            self._data_dir = Path(tempfile.mkdtemp(prefix="rollcast-broker-"))
        self._data_dir = self._data_dir.absolute()
        self._data_dir.mkdir(parents=True, exist_ok=True)
        with (self._data_dir / _LOCK_NAME).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataFolderTakenError(self._data_dir) from None
            yield file.fileno()

    def _write_settings(self) -> int:
        """Writes Kafka's settings into the data folder; returns the port for clients."""
        folder = self._folder()
        controller_port, own_port = free_ports(2)
        self._port = port = self._port or own_port
        properties = single_node_properties(self._config)
        properties |= {
            "listeners": f"PLAINTEXT://{LOOPBACK}:{port},CONTROLLER://{LOOPBACK}:{controller_port}",
            "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{port}",
            "controller.quorum.bootstrap.servers": f"{LOOPBACK}:{controller_port}",
            # Relative to the data folder, where the JVM runs: no name of a folder needs escaping.
            "log.dirs": "kafka",
        }
        lines = (f"{name}={value}\n" for name, value in properties.items())
        (folder / "server.properties").write_text("".join(lines), "utf-8")
        (folder / "log4j2.properties").write_text(_LOG4J2_PROPERTIES, "ascii")
        return port

    def _format_storage(self, java: list[str]) -> None:
        if (self._folder() / "kafka" / "meta.properties").exists():
            return
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        command = [*java, "kafka.tools.StorageTool", "format", "--standalone", "--ignore-formatted"]
        command += [f"--cluster-id={cluster_id}", "--config=server.properties"]
        try:
            with self.log_path.open("ab") as log:
                subprocess.run(
                    command,
                    cwd=self._folder(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    timeout=self._config.start_timeout_s,
                    check=True,
                )
        except subprocess.CalledProcessError as error:
            raise self._start_error(f"Kafka's storage tool failed with status {error.returncode}") from None
        except subprocess.TimeoutExpired as error:
            raise self._start_error(f"Kafka's storage tool did not end within {error.timeout:g} s") from None

    def _launch(self, command: list[str], lock: int) -> subprocess.Popen[bytes]:
        """Starts the JVM and its guard, each in a session of its own: Ctrl-C reaches only this process.

        The JVM inherits the descriptor `lock`.
        """
        temporary = "" if self._config.data_dir is not None else str(self._folder())
        with self.log_path.open("ab") as log:
            self._process = process = subprocess.Popen(
                command,
                cwd=self._folder(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[lock],
            )
            self._starter_pid = os.getpid()
            atexit.register(self._stop_at_exit)
            guard = [sys.executable, "-I", "-S", str(_GUARD), str(self._starter_pid), str(process.pid), temporary]
            self._guard = subprocess.Popen(
                guard, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return process

    def _await_answer(self, process: subprocess.Popen[bytes], port: int) -> None:
        deadline = time.monotonic() + self._config.start_timeout_s
        while not kafka_answers(port):
            try:
                status = process.wait(_PROBE_INTERVAL_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() >= deadline:
                    raise self._start_error(
                        f"Kafka does not answer on port {port} after {self._config.start_timeout_s:g} s"
                    ) from None
            else:
                raise self._start_error(f"Kafka ended with status {status} while it started on port {port}")

    def _start_error(self, what: str) -> BrokerStartError:
        return BrokerStartError(what, log_path=self.log_path, last_lines=self._last_lines())

    def _last_lines(self) -> list[str]:
        return self.log_path.read_text("utf-8", errors="replace").splitlines()[-_LAST_LINES:]

    def _give_up(self) -> None:
        self.kill()
        self._remove_temporary_folder()

    def _reap(self) -> None:
        """Takes leave of a JVM that has ended or is ending, and of its guard, which ends with it."""
        if self._process is not None:
            self._process.wait()
            self._process = None
            atexit.unregister(self._stop_at_exit)
        if self._guard is not None:
            self._guard.wait()
            self._guard = None

    def _remove_temporary_folder(self) -> None:
        if self._config.data_dir is None and self._data_dir is not None:
            shutil.rmtree(self._data_dir, ignore_errors=True)
            self._data_dir = None

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._starter_pid:  # a forked child inherits this hook, but not the broker
            self.stop()
