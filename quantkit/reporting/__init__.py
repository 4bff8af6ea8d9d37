"""The account of a run: model card, closing table, HTML page.

`checkpoint.report` builds and reads `quantkit_report.json`. `facts` puts its entries into words, which `summary` (the
closing table) and `model_card` print. `layer_errors` ranks its linears and gives causes. `html` collects the values of
the page, and the templates beside it draw them. Everything here works on plain report dictionaries; the pipeline
collects their entries. Begin with `facts`.
"""
