"""What a record is shown as: tables, pictures, and the targets that it is held against."""
