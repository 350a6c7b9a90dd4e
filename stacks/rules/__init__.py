"""What settings must satisfy together, and what each place asks of them."""
