"""moegemm-bench: our products beside what a user would pick instead, with tables and plots; see bench/cli.py."""
