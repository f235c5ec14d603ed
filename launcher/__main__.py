"""`python -m launcher VERB`: the same as `launch VERB`, for this very Python."""

from launcher.cli import main

if __name__ == "__main__":
    main()
