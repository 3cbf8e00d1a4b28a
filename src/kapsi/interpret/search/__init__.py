"""Search for a short formula of few inputs."""

from kapsi.interpret.search.search import Found, search_formula

__all__ = ["Found", "search_formula"]
