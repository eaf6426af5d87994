"""Programs of a problem as plain arrays, which know no engine: Checkmate's, a tighter one, and variants."""
