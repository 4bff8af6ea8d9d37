"""The promises to users, frozen: output bytes, report keys, help, exit codes, error texts, kill and resume.

Nothing here names a private part of quantkit. The tests use the command line, `quantkit.__all__`, and files on disk.
So they hold through any change of the modules. `frozen.json`, `help.txt` and `errors.txt` are written by
`python -m tests.promises.freeze`. Run it only to change a promise on purpose, and say why in the commit.
"""
