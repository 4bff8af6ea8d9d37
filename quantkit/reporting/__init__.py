"""What a run did, for people: report, model card, closing table, charts.

`report` builds and reads `quantkit_report.json`. `facts` puts its entries into words, which `summary` (the closing
table) and `model_card` print. `plots` and `html` draw it. Everything here works on plain report dictionaries; the
pipeline collects their entries. Begin with `report`.
"""
