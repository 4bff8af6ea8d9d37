"""The account of a run: model card, closing table, HTML page and picture.

`checkpoint.report` builds and reads `quantkit_report.json`. `facts` puts its entries into words, which `summary` (the
closing table) and `model_card` print. `layer_errors` ranks its linears and gives causes. `html` is the page and `plots`
the picture; both draw from `charts`. Everything here works on plain report dictionaries; the pipeline collects their
entries. Begin with `facts`.
"""
