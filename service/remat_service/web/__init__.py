"""The HTTP side: the application, its routes, the page, and what is said on the wire."""
