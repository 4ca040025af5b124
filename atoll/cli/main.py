"""The program `atoll`: the handling of signals before anything slow is imported, and the exit code of a bug."""

from atoll.cli import stopping
from atoll.ground.process.loading import keep_modules, loading


def run() -> None:
    """Run the command line. An unexpected exception is a bug: traceback, exit code 70, recovery by replay."""
    keep_modules()
    with stopping.one_line():
        try:
            with loading():
                from atoll.cli.commands import app

            app()
        except Exception:
            stopping.check()
            import traceback

            from atoll.cli.command import EXIT_BUG

            traceback.print_exc()
            raise SystemExit(EXIT_BUG) from None
