"""Records of jobs in SQL: tables, transactions, and the databases that can hold them."""
