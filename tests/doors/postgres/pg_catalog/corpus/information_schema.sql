--# information_schema: views
SELECT table_catalog, table_schema, table_name, is_updatable FROM information_schema.views WHERE table_schema = 'public'
--# information_schema: constraint columns
SELECT table_name, column_name, constraint_name FROM information_schema.constraint_column_usage WHERE table_schema = 'public' ORDER BY 1, 2
--# information_schema: referential constraints
SELECT constraint_name, unique_constraint_name FROM information_schema.referential_constraints WHERE constraint_schema = 'public'
--# information_schema: sequences
SELECT sequence_name FROM information_schema.sequences
--# information_schema: routines
SELECT routine_name, routine_type FROM information_schema.routines WHERE specific_schema NOT IN ('pg_catalog', 'information_schema')
--# information_schema: table privileges
SELECT grantee, privilege_type FROM information_schema.table_privileges WHERE table_schema = 'public' AND table_name = 'orders'
--# information_schema: role table grants
SELECT grantor, grantee, table_name, privilege_type, is_grantable FROM information_schema.role_table_grants WHERE table_name = 'orders' ORDER BY privilege_type
--# information_schema: all columns of a view
SELECT * FROM information_schema.columns WHERE table_name = 'big_orders' ORDER BY ordinal_position
--# information_schema: triggers
SELECT trigger_name FROM information_schema.triggers
--# information_schema: domains
SELECT domain_name FROM information_schema.domains WHERE domain_schema = 'public'
--# information_schema: catalog name
SELECT * FROM information_schema.information_schema_catalog_name
--# information_schema: enabled roles
SELECT role_name FROM information_schema.enabled_roles ORDER BY 1
--# information_schema: view table usage
SELECT view_name, table_name FROM information_schema.view_table_usage WHERE view_schema = 'public' ORDER BY 1, 2
--# information_schema: check constraints
SELECT constraint_name FROM information_schema.check_constraints WHERE constraint_schema = 'pg_none'
--# information_schema: foreign tables
SELECT foreign_table_name FROM information_schema.foreign_tables
