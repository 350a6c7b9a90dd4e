"""What makes sandboxes of Linux's namespaces, in processes of its own on the node: `python host` beside whoever asks for them.

`warden` makes and ends them; in each, `inside` is the first process and runs commands. In reading order: frames, kernel, filters, limits,
layout, commands, inside, warden; then what owns wardens: channel, owner; then pools: entry, room, meter, kept, web, pool, summary.
Standard library only, Python 3.10 and later: rendering lays this folder beside the node agent.
"""
