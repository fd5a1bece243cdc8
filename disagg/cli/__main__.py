"""`python -m disagg.cli`, and the `disagg` script."""

from __future__ import annotations

from disagg.cli.interrupts import end_at_ctrl_c


def main() -> None:
    end_at_ctrl_c()  # before anything else is imported
    from disagg.telemetry.process import open_standard_descriptors

    open_standard_descriptors()  # before anything opens a file
    from disagg.cli.main import main as run

    try:
        run()
    except SystemExit as end:
        from disagg.telemetry.process import leave

        leave(end.code)


if __name__ == "__main__":
    main()
