"""The output of a command on a full disk, and the files that it leaves there."""


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def assert_told(capsys, path):
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1, told
    assert (
        str(path) in told
        and "No space left on device; free some space, then rerun the command" in told
    )
