"""The command, also as `python -m slimstate`, which `torchrun -m slimstate` starts in several processes."""

from slimstate.system.interruption import STOP


def main() -> None:
    """Run the command; signals are handled before its imports, which take a while."""
    STOP.listen()
    from slimstate import cli

    cli.main()


if __name__ == "__main__":
    main()
