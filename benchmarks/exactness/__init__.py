"""How exact plans are: torch's own samples of modules and operators, and architectures, next to `aot_eager`."""
