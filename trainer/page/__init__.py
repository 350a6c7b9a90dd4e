"""The page of runs: what their folders tell, served live or in one file. Runs on the head, or where a person reads; needs no torch.

    record      episodes.db beside a run: the only file here that the trainer writes with
    metrics     metrics.jsonl, read as it grows; curves of few points
    runs        which runs there are, what each is and did
    reasons     in words: what moved at a step, which settings changed
    episodes    answers, found by what they were worth
    lanes       where the time of a traced step went; causes: in words, perfetto: as a file for Perfetto
    answers     what the page asks, by path: for the server and for one file alike
    server      aiohttp on a socket; bundle: one file that opens offline

The folder is copied to the head by itself and run by its path, so its modules import one another by relative names, and besides
the standard library only yaml and aiohttp, which Ray brings.
"""
