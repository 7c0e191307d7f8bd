"""The command line. Every command takes `--json`; an error is one line and an exit code."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from tilegen import api
from tilegen.cli.bundle import bundle, generate
from tilegen.cli.cache import cache_app
from tilegen.cli.candidates import table
from tilegen.cli.compare import compare
from tilegen.cli.diff import cache_diff
from tilegen.cli.examples import examples
from tilegen.cli.help import help_
from tilegen.cli.options import (
    ByModel,
    FastMemory,
    Gpu,
    Json,
    KernelsOption,
    OneKernel,
    Problem,
    columns,
    console,
    positive,
    print_for_terminal,
    print_json,
    print_wrapped,
    say_unless,
    titled,
    working,
)
from tilegen.cli.tuning import RayAddress, tune
from tilegen.cli.warm import warm
from tilegen.devices import device_of
from tilegen.disk import log, printable
from tilegen.errors import InvalidProblem, TilegenError, Unsupported
from tilegen.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="tilegen: an autotuning compiler for attention. Start with: tilegen demo",
)
cache_app.command("diff")(cache_diff)
app.add_typer(cache_app, name="cache")

LABEL = 9
"""Columns before the text of a line of an explanation."""
FAILED, MISTYPED, INTERRUPTED, TERMINATED = 1, 2, 130, 143
"""Exit codes: it ran and failed, or found something wrong; what was typed is wrong or cannot be
done here; Ctrl-C; SIGTERM."""
CommandLineError: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
"""Click's error class, which some versions of typer contain under another name."""


def main() -> None:
    """Run the command line; turn errors into one line and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names may have any characters
        sys.stdout.reconfigure(errors="backslashreplace")
    handler: logging.Handler = logging.StreamHandler()  # no folding unless it is a terminal
    if sys.stderr.isatty():
        handler = RichHandler(
            console=Console(stderr=True), show_time=False, show_path=False, show_level=False
        )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(message)s")
    logging.getLogger("tilegen").setLevel(logging.INFO)
    codes = [INTERRUPTED]

    def terminate(*_: object) -> None:
        codes.append(TERMINATED)
        raise KeyboardInterrupt  # ends what runs as Ctrl-C does, with nothing half-written

    signal.signal(signal.SIGTERM, terminate)
    try:
        _run(codes)
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(FAILED)


def _run(codes: list[int]) -> None:
    """Run the command line. The last of `codes` is that of an interrupted command."""
    try:
        code = app(prog_name="tilegen", standalone_mode=False)
        sys.stdout.flush()  # inside the try: a reader that is gone is not an error
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code:  # the command found something wrong
            sys.exit(int(code))
    except CommandLineError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
        else:
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "tilegen"
            _fail(f"{error.format_message().rstrip('.')}; see {command} --help", MISTYPED)
    except TilegenError as error:
        _fail(str(error), MISTYPED if isinstance(error, InvalidProblem | Unsupported) else FAILED)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted; what is done is kept: the same command goes on", codes[-1])
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, a name that is too long
        named = f"{str(error.filename)!r}: " if error.filename else ""
        typed = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)
        _fail(f"{named}{error.strerror or type(error).__name__}", MISTYPED if typed else FAILED)


def _print_version(wanted: bool) -> None:
    if wanted:
        console.print(f"tilegen {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="print the version", callback=_print_version)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="results and errors only")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="the log of all steps, too")] = False,
) -> None:
    """Take the options that belong to no command."""
    if quiet or verbose:
        log.setLevel(logging.ERROR if quiet else logging.DEBUG)


@app.command()
def demo(
    problem: Annotated[str, typer.Argument(help="notation")] = "",
    seconds: Annotated[
        float | None,
        typer.Option(help="to spend on tuning; 40 on a GPU, 16 on a CPU", callback=positive),
    ] = None,
    json_: Json = False,
) -> None:
    """Run the whole pipeline on one attention layer and tell what happens.

    Without a GPU the kernels are compiled for the CPU and tuned there. Example: tilegen demo
    """
    from tilegen.cli.demo import demonstrate

    results = demonstrate(problem, say_unless(json_), seconds, columns())
    if json_:
        print_json(results)


@app.command()
def propose(
    problem: Problem,
    gpu: Gpu = None,
    kernel: OneKernel = api.FORWARD,
    top: Annotated[int, typer.Option(help="how many")] = 10,
    fast_memory: FastMemory = None,
    compile_: Annotated[
        bool,
        typer.Option("--compile", help="compile the first few, and rank those by machine code"),
    ] = False,
    json_: Json = False,
) -> None:
    """Rank tiles by the cost model, best first, with the reason for each; and say of those that
    were compiled here, now or before, what the compiler made of them.

    Example: tilegen propose "b4 hq32 hkv8 q4096 d128 bf16 causal" --gpu h200
    """
    parsed, device = api.problem_of(problem[0]), device_of(gpu, fast_memory)
    candidates = api.propose(parsed, device, kernel=kernel, top=top, compile=compile_)
    if json_:
        print_json([{"gpu": device.name, **asdict(candidate)} for candidate in candidates])
        return
    if parsed.rewriting:
        console.print(parsed.rewriting)
    print_wrapped([f"{parsed.normal()}, on {titled(device)}"])
    for line in table(candidates):
        console.print(line)


@app.command()
def explain(
    problem: Problem,
    gpu: Gpu = None,
    kernel: KernelsOption = "all",
    config: Annotated[str | None, typer.Option(help="this config instead of the choice")] = None,
    fast_memory: FastMemory = None,
    latex: Annotated[bool, typer.Option("--latex", help="print the formulas as LaTeX")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw to this .png, .svg or .pdf")] = None,
    by_model: ByModel = False,
    static: Annotated[
        bool, typer.Option("--static", help="compile, and describe the machine code, loop by loop")
    ] = False,
    section: Annotated[
        list[str] | None,
        typer.Option(
            help="pass, tile, mask, traffic, bound, time, next, others or measured; repeatable"
        ),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="all sections")] = False,
    json_: Json = False,
) -> None:
    """Explain the tile of each kernel in six lines: problem, kernel, time, limit, lower bound, and
    what would change the choice; the numbers behind them by section.

    Example: tilegen explain "b4 hq32 hkv8 q4096 d128 bf16 causal" --gpu a100 --kernel fwd
    """
    if static:
        read = api.read_code(problem[0], gpu, kernel=kernel, config=config, fast_memory=fast_memory)
        if json_:
            print_json(read)
            return
        from tilegen.explaining.machine_code import lines_of_code

        console.print("\n\n".join("\n".join(lines_of_code(code)) for code in read))
        return
    with working("choosing and compiling"):
        explanation = api.explain(
            problem[0],
            gpu,
            kernel=kernel,
            config=config,
            fast_memory=fast_memory,
            by_model=by_model,
        )
    if plot is not None:
        explanation.plot(plot)
    if json_:
        print_json(explanation.values)
        return
    if latex:
        console.print(explanation.latex())
        return
    sections = [*(section or ()), *([api.ALL] if all_ else ())]
    print_for_terminal(explanation.text(*sections), LABEL)
    if not sections:
        console.print("\nmore: --all, or --section NAME; see tilegen explain --help")
    if plot is not None:
        console.print(f"drawn to {plot}")


@app.command()
def show(
    problem: Problem,
    gpu: Gpu = None,
    kernel: OneKernel = api.FORWARD,
    config: Annotated[
        str | None, typer.Option(help="m128n64w8s3; default: the choice of a call")
    ] = None,
    by_model: ByModel = False,
    unaligned: Annotated[bool, typer.Option(help="for strides of any number of elements")] = False,
    json_: Json = False,
) -> None:
    """Print an emitted kernel: a Python file that needs torch and triton only.

    Example: tilegen show "hq32 hkv8 q4096 d128 bf16 causal" --kernel bwd_dq
    """
    device = device_of(gpu)
    rendered = api.show(
        problem[0], device, kernel=kernel, config=config, unaligned=unaligned, by_model=by_model
    )
    if json_:
        print_json(
            {
                "gpu": device.name,
                "kernel": rendered.kernel,
                "problem": rendered.problem.key,
                "config": asdict(rendered.config),
                "function": rendered.function,
                "digest": rendered.digest,
                "source": rendered.source,
            }
        )
    else:
        sys.stdout.write(f"# For {titled(device)}.\n{rendered.source}")


app.command("help")(help_)
app.command()(examples)
app.command()(compare)
app.command()(generate)
app.command()(bundle)


app.command(cls=RayAddress)(tune)
app.command()(warm)


@app.command()
def verify(
    problem: Problem,
    config: Annotated[str | None, typer.Option(help="for all kernels; default: the choice")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="catalogue name; default: the GPU here, else h200")
    ] = None,
    json_: Json = False,
) -> None:
    """Run forward and backward against the reference; without a GPU compiled for the CPU, and
    what is large at a reduced size.

    Example: tilegen verify "b1 hq4 hkv1 q200 d64 bf16 causal"
    """
    from tilegen.check.verification import require

    with working("running kernels and the reference"):
        checks = api.verify(problem[0], gpu, config=config)
    if json_:
        print_json([asdict(check) for check in checks])
    else:
        for check in checks:
            console.print(str(check))
    require(checks)


@app.command()
def doctor(json_: Json = False) -> None:
    """Say what this machine has and where tilegen looks.

    Example: tilegen doctor
    """
    from tilegen.cli.doctor import examine

    findings = examine()
    if json_:
        print_json({finding.name: finding.value for finding in findings})
        return
    for finding in findings:
        console.print(f"{finding.name:20}{finding.value}")


def _fail(message: str, code: int) -> None:
    """Print a message as one line, with control characters escaped, and exit. Under `--json` the
    standard output has it as JSON, too."""
    line = printable(" ".join(message.split()))
    if "--json" in sys.argv:
        print_json({"error": line, "exit": code})
    Console(stderr=True, soft_wrap=True, highlight=False).print(
        "[red]error:[/red]", escape(line), sep=" "
    )
    sys.exit(code)
