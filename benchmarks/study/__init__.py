"""The study of docs/study.md: recipes compared (`__main__`), programs and summaries that the results write."""
