"""The account of a run: model card, closing table, HTML page, from plain report dictionaries. Begin
with `facts`.
"""
