"""The protocol of operators: tokenpod.admin.v1."""
