"""`python -m moegemm`: the program."""

from moegemm.program import main

if __name__ == "__main__":
    main()
