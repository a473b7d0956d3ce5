"""The command as `python -m slimstate`, which `torchrun -m slimstate` starts in several processes."""

from slimstate.cli import main

if __name__ == "__main__":
    main()
