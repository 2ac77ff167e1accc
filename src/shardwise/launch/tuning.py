"""`shardwise run --autotuning`: runs the user's command with candidate configurations, and keeps the best one.

Every run is an ordinary job in a process of its own with a time limit. The script gets a candidate's configuration in
the place of the file that its command names, and from the variable `CONFIG_OVERRIDE`, which `initialize` reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from shardwise.comm.environment import CONFIG_OVERRIDE
from shardwise.errors import CommandLineError, ConfigError, LaunchError
from shardwise.launch import pdeathsig_exec
from shardwise.launch.console import output, table
from shardwise.launch.failure import last_traceback
from shardwise.launch.job import Job, command_line
from shardwise.units import format_size

if TYPE_CHECKING:
    from shardwise.config.schema.tuning import Autotuning
    from shardwise.plan.autotune import Result, Status
    from shardwise.plan.candidates import Candidate, ModelFacts

CONFIG_OPTIONS = ("--deepspeed_config", "--deepspeed")
"""Arguments of scripts that name the configuration, with a section `autotuning` or without."""
GRACE_S = 5.0
"""Seconds in which a run ends after its time limit."""
EXIT_S = 10.0
"""Seconds in which a run ends after its result."""
LAUNCH = (sys.executable, "-m", "shardwise.launch", "run")
"""Command that starts a run; its options and the script follow."""
_POLL_S = 0.05
_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "can't allocate memory", "not enough memory")
_KILLED = (128 + signal.SIGKILL, 12)  # by the kernel; by the library's memory watchdog


class Interrupted(Exception):
    """A signal ends the search."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Ended:
    """The end of a run: its report if there is one, and otherwise the reason."""

    code: int | None
    report: dict[str, Any] | None
    status: Status = "measured"
    reason: str = ""


class Tuning:
    """A search for one job. `config`: of the user; None until the first run, if no argument of the script names it."""

    def __init__(self, job: Job) -> None:
        self.job = dataclasses.replace(job, autotuning=None)
        self._place = config_argument(job.args)
        self.file = None if self._place is None else _argument(job.args, self._place)
        self.config = None if self.file is None else _load(self.file)
        self.options = _options(self.config or {}, self.file)
        self.results: list[Result] = []
        self.facts: ModelFacts | None = None
        self._display = Display(job.quiet)

    # -- the search --------------------------------------------------------------------------------------------------

    def tune(self) -> int:
        """Search; write results, and the best configuration with its command. Return the exit code."""
        from shardwise.plan import autotune

        with _signals(), self._display:
            if self.file is None:
                self._display.say(
                    "no argument of the script names a configuration file: settings replace those of the configuration "
                    f"that the script passes to initialize() ({CONFIG_OVERRIDE})"
                )
            try:
                problem = self._describe()
                if problem:
                    self._display.say(problem)
                    return 1
                self._measure_all()
            except Interrupted as ended:
                self._display.say(f"received {ended}; the results so far are in {self.options.results_dir}")
                self._write_summary()
                return 128 + ended.number
        self._write_summary()
        best = autotune.best_of(self.results, self.options)
        if best is None:
            reasons = "\n".join(f"  {one.name}: {one.status}: {one.reason}" for one in self.results)
            print(f"shardwise run: no candidate could be measured:\n{reasons}", file=sys.stderr)
            return 1
        self.write_optimal()
        return 0

    def _describe(self) -> str:
        """Run the script for one step; return what went wrong, if anything."""
        from shardwise.plan.candidates import ModelFacts, fixed

        path = self._directory(self.options.results_dir) / "model_info.json"
        base = self.config
        kept = self._kept(path, base, self._command(None))
        if kept is not None:
            self.facts = ModelFacts.read(kept["facts"])
        else:
            self._display.begin("the first run, which describes the model")
            ended = self._first_run("model_info", {})
            if ended.report is None and ended.status == "out of memory":
                self._display.say(f"the first run: {ended.status}: {ended.reason}; again with the least memory")
                least = self.options.min_train_micro_batch_size_per_gpu
                small: dict[str, Any] = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": least}
                if self.config is None or fixed(self.config) is not None:
                    small["gradient_accumulation_steps"] = None  # follows from the batch
                ended = self._first_run("model_info_z3", small)
            if ended.report is None:
                reason = f"{ended.status}: {ended.reason} (logs: {self.options.exps_dir})"
                return f"nothing was tuned, because the first run failed: {reason}"
            self.facts = ModelFacts.read(ended.report)
        if self.config is None:
            self.config = self.facts.config
            self.options = _options(self.config, None)
        if kept is None:
            self._write("model_info.json", {"config": base, "command": self._command(None), "facts": ended.report})
        for note in self.facts.notes:
            self._display.say(note)
        return ""

    def _first_run(self, name: str, changes: dict[str, Any]) -> Ended:
        from shardwise.plan.candidates import fixed

        report = self._directory(self.options.exps_dir, name) / "report.json"
        section = {"enabled": True, "model_info": {"profile": True}, "model_info_path": str(report.resolve())}
        config: dict[str, Any] = {**changes, "autotuning": section}
        # A client library may put numbers in the place of "auto"; they are no wish to keep the batch.
        if self.config is not None and fixed(self.config) is None:
            config["train_batch_size"] = None
        return self._run(name, config, report)

    def _measure_all(self) -> None:
        from shardwise.plan import autotune

        assert self.facts is not None
        facts, options = self.facts, self.options
        found: dict[str, Result] = {}
        queue = autotune.ordered(facts.candidates, options)
        started = without_gain = 0
        varied = False
        while queue:
            candidate = queue.pop(0)
            reason = autotune.excluded(candidate, facts.candidates, options)
            reason = reason or autotune.excluded_by_results(candidate, found, facts.candidates)
            if not reason and started >= options.tuner_num_trials:
                reason = f"autotuning.tuner_num_trials is {started}"
            if not reason and without_gain >= options.tuner_early_stopping:
                reason = f"{without_gain} runs before it were no better than the best"
            before = autotune.best_of(self.results, options)
            if reason:
                result = self._unrun(candidate, reason)
            else:
                number, total = started + 1, started + 1 + len(queue)
                best = "" if before is None else f"; best: {before.name}, {autotune.in_words(before, options)}"
                self._display.begin(f"run {number} of {total} at most, {candidate.name}{best}", number - 1, total)
                result = self._measure(candidate)
                started += not result.kept
                self._display.say(f"{result.name}: {autotune.in_words(result, options)}{' (kept)' * result.kept}")
            self.results.append(result)
            found[candidate.name] = result
            self._write(f"{result.name}.json", dataclasses.asdict(result))
            best_now = autotune.best_of(self.results, options)
            if not reason and before is not None:
                without_gain = 0 if best_now is not before else without_gain + 1
            if not queue and not varied and best_now is not None:
                varied = True
                named = {one.name: one for one in facts.candidates}
                without_gain = 0
                queue = autotune.variations(named[best_now.name], facts, options)

    def _unrun(self, candidate: Candidate, reason: str) -> Result:
        from shardwise.plan.autotune import Result

        config = self._config_of(candidate)
        return Result(candidate.name, config, self._command(candidate), "not run", reason, planned=candidate.memory)

    def _measure(self, candidate: Candidate) -> Result:
        from shardwise.plan.autotune import Result, judged

        assert self.facts is not None
        config, command = self._config_of(candidate), self._command(candidate)
        kept = self._kept(self._directory(self.options.results_dir) / f"{candidate.name}.json", config, command)
        if kept is not None and kept["status"] != "not run":
            return Result(**{**kept, "kept": True})
        report = self._directory(self.options.exps_dir, candidate.name) / "report.json"
        options = self.options
        section = {
            "enabled": True,
            "metric_path": str(report.resolve()),
            "start_profile_step": options.start_profile_step,
            "end_profile_step": options.end_profile_step,
            "model_info": {"profile": False},
        }
        ended = self._run(candidate.name, {**candidate.config, "autotuning": section}, report, candidate)
        if ended.report is not None:
            return judged(candidate, config, command, ended.report, self.facts, options)
        return Result(
            candidate.name, config, command, ended.status, ended.reason, planned=candidate.memory, exit=ended.code
        )

    # -- one run -----------------------------------------------------------------------------------------------------

    def _run(self, name: str, override: dict[str, Any], report: Path, candidate: Candidate | None = None) -> Ended:
        """Run the job with a configuration until it reports, ends, or the time is over."""
        from shardwise.config.read import merged
        from shardwise.plan.autotune import write

        directory = report.parent
        report.unlink(missing_ok=True)
        write(directory / "override.json", override)
        config = None
        if self.file is not None:
            assert self.config is not None
            config = directory / "ds_config.json"
            write(config, merged(self.config, override))
        job = self._job_of(config, candidate)
        environment = {**os.environ, CONFIG_OVERRIDE: str((directory / "override.json").resolve())}
        deadline = time.monotonic() + self.options.time_limit
        with open(directory / "stdout.log", "wb") as out, open(directory / "stderr.log", "wb") as err:
            try:
                # The run is not in the terminal's process group: Ctrl-C comes to the search only, which ends the run.
                process = subprocess.Popen(
                    [*_with_this_process(), *LAUNCH, *command_line(job)],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(f"--autotuning: cannot start a run: {error}.") from error
            try:
                over = reported = False
                while process.poll() is None and not over:
                    self._display.tick()
                    time.sleep(_POLL_S)
                    if report.exists() and not reported:
                        reported, deadline = True, min(deadline, time.monotonic() + EXIT_S)
                    over = time.monotonic() > deadline
            finally:
                _end(process)
        text = (directory / "stderr.log").read_text(encoding="utf-8", errors="replace")
        return self._ended(process.returncode, over, report, text, first=candidate is None)

    def _ended(self, code: int, over: bool, report: Path, errors: str, *, first: bool) -> Ended:
        if report.exists():
            return Ended(code, json.loads(report.read_text(encoding="utf-8")))
        if over:
            limit = self.options.time_limit
            return Ended(code, None, "time limit", f"no result after {limit:g} s (autotuning.time_limit)")
        if code == 0 and first:
            reason = "no engine has taken a step. The script calls shardwise.initialize() with an optimizer, and step()"
            return Ended(code, None, "failed", reason)
        if code == 0:
            last = self.options.end_profile_step
            reason = f"the script ended before step {last}. Give it more data, or write a smaller"
            return Ended(code, None, "failed", f"{reason} autotuning.end_profile_step")
        reason = _reason(errors)
        if code in _KILLED or any(sign in reason for sign in _OUT_OF_MEMORY):
            return Ended(code, None, "out of memory", reason)
        return Ended(code, None, "failed", reason)

    def _job_of(self, config: Path | None, candidate: Candidate | None) -> Job:
        return dataclasses.replace(
            self.job,
            args=self._arguments(config, candidate),
            max_restarts=0,
            min_nproc=None,
            log_dir=None,
            pid_file=None,
            grace=GRACE_S,
            tags="always",
            quiet=True,
        )

    def _arguments(self, config: Path | None, candidate: Candidate | None) -> tuple[str, ...]:
        args = list(self.job.args)
        if self._place is not None and config is not None:
            option, equals, _ = args[self._place].partition("=")
            args[self._place] = f"{option}={config}" if equals and option.startswith("-") else str(config)
        for path, flag in (self.options.arg_mappings or {}).items() if candidate is not None else ():
            assert candidate is not None
            value: Any = candidate.config
            for name in path.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
            if value is not None:
                _set(args, flag, str(value))
        return tuple(args)

    def _command(self, candidate: Candidate | None) -> list[str]:
        return command_line(dataclasses.replace(self.job, args=self._arguments(None, candidate)))

    def _config_of(self, candidate: Candidate) -> dict[str, Any]:
        from shardwise.config.read import merged

        assert self.config is not None
        plain = {name: value for name, value in self.config.items() if name != "autotuning"}
        return merged(plain, candidate.config)

    # -- files -------------------------------------------------------------------------------------------------------

    def _directory(self, *parts: str) -> Path:
        path = Path(*parts)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"--autotuning: {path}: cannot make the directory: {error.strerror}.") from error
        return path

    def _write(self, name: str, value: Any) -> None:
        from shardwise.plan.autotune import write

        write(self._directory(self.options.results_dir) / name, value)

    def _kept(self, path: Path, config: Any, command: list[str]) -> dict[str, Any] | None:
        """Return an earlier file of the same configuration and command, if such files are kept."""
        if self.options.overwrite or not path.is_file():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found if found.get("config") == config and found.get("command") == command else None

    def _write_summary(self) -> None:
        from shardwise.plan import autotune

        rows = self.rows()
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        best = autotune.best_of(self.results, self.options)
        if best is not None:
            lines += ["", f"best: {best.name}, {autotune.in_words(best, self.options)}"]
        path = self._directory(self.options.results_dir) / "summary.txt"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def rows(self) -> list[list[str]]:
        """Return the table of results, best first, with its heading."""
        from shardwise.plan import autotune

        measured = [one for one in self.results if one.status == "measured"]
        others = [one for one in self.results if one.status != "measured"]
        found = [["candidate", self.options.metric, "planned memory", "memory", "reason"]]
        for one in [*sorted(measured, key=autotune.better(self.options)), *others]:
            value = autotune.in_words(one, self.options) if one.status == "measured" else one.status
            sizes = [format_size(one.planned), format_size(one.memory)]
            found.append([one.name, value, *sizes, one.reason])
        return found

    def print_results(self) -> None:
        """Print the table of results on standard output."""
        head, *rows = self.rows()
        shown = table(*head)
        for row in rows:
            shown.add_row(*row)
        output().print(shown)

    def write_optimal(self) -> Job:
        """Write the best configuration and its command; return its job."""
        from shardwise.plan import autotune

        best = autotune.best_of(self.results, self.options)
        if best is None:
            raise LaunchError("--autotuning: no candidate was measured; `summary.txt` has the reasons.")
        assert self.facts is not None
        self._write("ds_config_optimal.json", best.config)
        path = Path(self.options.results_dir) / "ds_config_optimal.json"
        candidates = {one.name: one for one in self.facts.candidates}
        candidate = candidates.get(best.name) or candidates[best.name.removesuffix("_buckets")]
        job = dataclasses.replace(self.job, args=self._arguments(path, candidate))
        command = shlex.join(["shardwise", "run", *command_line(job)])
        if self.file is None:
            command = f"{CONFIG_OVERRIDE}={shlex.quote(str(path.resolve()))} {command}"
        (path.parent / "cmd_optimal.txt").write_text(command + "\n", encoding="utf-8")
        return job

    def best_job(self) -> Job:
        """Return the job with the best configuration, to be run in this process's environment."""
        job = self.write_optimal()
        if self.file is None:
            path = Path(self.options.results_dir) / "ds_config_optimal.json"
            os.environ[CONFIG_OVERRIDE] = str(path.resolve())
        return job


def tune(job: Job) -> tuple[int, Job | None]:
    """Search, and print the results. Return the exit code, and the job with the best configuration if there is one.

    Raises:
        CommandLineError: an option cannot be combined with the search.
        ConfigError: the configuration, or its section `autotuning`, is wrong.
    """
    search = Tuning(job)
    code = search.tune()
    if search.results:
        search.print_results()
    if code:
        return code, None
    directory = search.options.results_dir
    print(f"best configuration: {directory}/ds_config_optimal.json; its command: {directory}/cmd_optimal.txt")
    return 0, search.best_job()


def config_argument(args: Sequence[str]) -> int | None:
    """Return the place of the argument that names the configuration: after --deepspeed_config or --deepspeed, or any
    JSON file with a section `autotuning`. Raises CommandLineError if there are several.
    """
    named = [place for place in range(len(args)) if _follows(args, place) and Path(_argument(args, place)).is_file()]
    found = named or [place for place in range(len(args)) if _has_section(_argument(args, place))]
    if len({_argument(args, place) for place in found}) > 1:
        files = ", ".join(_argument(args, place) for place in found)
        raise CommandLineError(f"--autotuning: several arguments of the script name a configuration: {files}.")
    return found[0] if found else None


def _follows(args: Sequence[str], place: int) -> bool:
    option, equals, _ = args[place].partition("=")
    return option in CONFIG_OPTIONS if equals else place > 0 and args[place - 1] in CONFIG_OPTIONS


def _argument(args: Sequence[str], place: int) -> str:
    option, equals, value = args[place].partition("=")
    return value if equals and option.startswith("-") else args[place]


def _has_section(name: str) -> bool:
    if not name.endswith(".json") or not Path(name).is_file():
        return False
    try:
        return "autotuning" in _load(name)
    except ConfigError:
        return False


def _load(path: str) -> dict[str, Any]:
    from shardwise.config import load

    return load(Path(path))


def _options(config: Mapping[str, Any], file: str | None) -> Autotuning:
    """Return the section of a configuration. Raises ConfigError with the path of what is wrong."""
    from shardwise.config import resolve
    from shardwise.config.read import Document

    section = config.get("autotuning")
    if isinstance(section, Mapping):
        section = {**section, "enabled": True}
    document = {"train_batch_size": 1, "autotuning": section}
    return resolve(Document(document, file or "the config dict")).config.autotuning


def _set(args: list[str], flag: str, value: str) -> None:
    """Set an option in the arguments of a script, or append it."""
    for place, argument in enumerate(args):
        if argument.startswith(f"{flag}="):
            args[place] = f"{flag}={value}"
            return
        if argument == flag and place + 1 < len(args):
            args[place + 1] = value
            return
    args += [flag, value]


def _reason(errors: str) -> str:
    """Return the last exception of a run, in one line, or the last line of its errors."""
    text, _ = last_traceback(errors)
    last = text.rpartition("Traceback (most recent call last)")[2]  # of those that are chained
    lines = [line for line in last.splitlines() if line.strip(" :")]
    plain = [line for line in lines if not line[0].isspace()]
    return " ".join((plain or lines or ["it printed nothing on its standard error"])[0].split())[:400]


def _with_this_process() -> list[str]:
    """Return the beginning of a command that is killed when this process ends."""
    return [sys.executable, "-I", "-S", str(pdeathsig_exec.__file__), str(os.getpid())]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run that has not ended."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(2 * GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks end with it
        process.wait()


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Raise `Interrupted` for the signals that end a command."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before: dict[signal.Signals, Any] = {}
    with contextlib.suppress(ValueError):  # not the main thread: the caller handles signals
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(one) is not signal.SIG_IGN:
                before[one] = signal.signal(one, handle)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class Display:
    """Progress on standard error: a bar on a terminal, and a line for each result."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Display:
        if sys.stderr.isatty() and not self._quiet:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True, highlight=False), transient=True)
            self._progress.start()
            self._task = self._progress.add_task("", total=None)
        return self

    def begin(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Show what runs now."""
        if self._progress is not None:
            self._progress.update(self._task, description=what, completed=done, total=total)
        else:
            self.say(what)

    def tick(self) -> None:
        """Draw the elapsed time."""
        if self._progress is not None:
            self._progress.refresh()

    def say(self, line: str) -> None:
        """Print a line."""
        if self._quiet:
            return
        if self._progress is not None:
            self._progress.console.print(f"shardwise run: {line}", markup=False)
        else:
            print(f"shardwise run: {line}", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
