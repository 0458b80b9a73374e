"""What is measured besides products, each a module: its record, and the page of it."""
