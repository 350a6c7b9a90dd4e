"""`flotilla`: the same verbs with the same meaning in every place, over the commands of the other packages, which it prints."""
