-- What an earlier migration of the same transaction changed is told to the feed first: a table with deferred
-- triggers pending cannot be altered.
SET CONSTRAINTS ALL IMMEDIATE;
SET CONSTRAINTS ALL DEFERRED;

-- The last activation that waited for warmth and was refused it, and the operator's words about why: whoever waits
-- reads them here. Both have defaults, so the previous release can go on reading and writing the table.
ALTER TABLE adapters
    ADD COLUMN intent_refused text,
    ADD COLUMN intent_refusal text NOT NULL DEFAULT '';
