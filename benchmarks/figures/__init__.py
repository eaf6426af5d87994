"""The figures of the papers, measured again: data, pictures and the page in the docs."""
