"""The reliability campaign: families of attacks with counted cases, run by `python -m tests.reliability`.

docs/reliability.md, section 4, says what each family shows. A module holds the families of one subject, in `FAMILIES`.
"""
