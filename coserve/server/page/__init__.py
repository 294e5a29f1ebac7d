"""The page at / and /ui: what serves and what learns, live; chat; jobs. Templates, a style sheet
and a small script, served by this server alone. The routes are in `coserve.server.routes.page`.
"""
