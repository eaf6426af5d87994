"""Several ranks that train one model: what they agree on before they train by plans, and what is refused."""
