"""Make `python -m fairbatch_lightning` the same as `fairbatch`."""

from fairbatch_lightning.cli.main import main

if __name__ == "__main__":
    main()
