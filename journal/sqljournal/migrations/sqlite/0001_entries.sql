-- One row says which schema this is and which secret belongs to it.
CREATE TABLE idem_meta (
  one          INTEGER PRIMARY KEY CHECK (one = 1),
  version      INTEGER NOT NULL,
  secret_check BLOB NOT NULL
) STRICT;

-- Times are microseconds since 1970, 0 for none; key_window is nanoseconds.
CREATE TABLE idem_entries (
  seq         INTEGER PRIMARY KEY,
  scope       TEXT NOT NULL,
  name        TEXT NOT NULL,
  id          TEXT NOT NULL,
  generation  INTEGER NOT NULL,
  key         TEXT NOT NULL,
  fingerprint BLOB,
  state       INTEGER NOT NULL,
  created     INTEGER NOT NULL,
  key_window  INTEGER NOT NULL,
  first_send  INTEGER NOT NULL,
  clear       INTEGER NOT NULL,
  enlisted    INTEGER NOT NULL,
  attempts    INTEGER NOT NULL,
  resumes     INTEGER NOT NULL,
  owner       TEXT NOT NULL,
  lease       INTEGER NOT NULL,
  fence       INTEGER NOT NULL,
  finished    INTEGER NOT NULL,
  status      INTEGER NOT NULL,
  reference   TEXT NOT NULL,
  decision    TEXT NOT NULL,
  reason      TEXT NOT NULL,
  expires     INTEGER NOT NULL,
  request     BLOB,
  answer      BLOB,
  mac         BLOB NOT NULL
) STRICT;

-- The names are kept twice, in the table and in this index, so that the
-- integrity check sees a name that changed: it would be another operation.
CREATE UNIQUE INDEX idem_entries_operation ON idem_entries (scope, name, id);

-- The others are partial: an entry pays only for what may still happen to it.
CREATE INDEX idem_entries_pending ON idem_entries (created, seq) WHERE state = 0 AND expires = 0;
CREATE INDEX idem_entries_finished ON idem_entries (finished, seq) WHERE finished > 0 AND expires = 0;
CREATE INDEX idem_entries_stored ON idem_entries (finished + key_window / 1000)
  WHERE finished > 0 AND expires = 0 AND (request IS NOT NULL OR answer IS NOT NULL);
CREATE INDEX idem_entries_expires ON idem_entries (expires, seq) WHERE expires > 0;
