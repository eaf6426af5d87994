"""How exact training by plans is: torch's own samples of modules and operators, and architectures, next to `aot_eager`."""
