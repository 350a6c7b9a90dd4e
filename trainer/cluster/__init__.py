"""Where the processes of a run are, who starts them, waits for them, and whose turn it is: Ray, or one process. Runs in the driver."""
