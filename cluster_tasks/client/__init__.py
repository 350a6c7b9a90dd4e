"""What runs on the machine of the person who submits: jobs, their clusters on dstack, and what both are doing."""
