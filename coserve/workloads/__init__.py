"""What servers are tried with: when requests come and how long they are, who sends them, and data
to learn from.
"""
