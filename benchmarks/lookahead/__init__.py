"""Lookahead caching: where a cache should be, what deciding costs, and what steps cost with one."""
