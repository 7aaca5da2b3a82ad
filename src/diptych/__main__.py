"""``python -m diptych``: the ``diptych`` command of this interpreter, wherever its scripts are."""

from diptych.cli.entry_point import main

if __name__ == "__main__":
    main()
