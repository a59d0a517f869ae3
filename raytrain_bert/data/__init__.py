"""From files to labelled rows: read, audit, label space, split, tokenise."""
