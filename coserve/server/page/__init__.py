"""The page at / and /ui: state of the server, chat, and jobs.

Templates, a style sheet and a small script, all from this server. The routes are in
`coserve.server.routes.page`.
"""
