"""Lists the fields of Spark Connect requests that clients may set without the right to run code.

These fields affect nothing outside a query. All others are refused, because they run code of the
client, name a file, a class or an address, change what others see, or came with a release that was
not reviewed yet. A test compares the lists with the messages of the installed PySpark, and fails if
a field is in neither list. Before you add a field here, check what Spark's server does with it.

For some fields only certain values are permitted (`plan_rights`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PREFIX: Final = "spark.connect."
_PERMITTED: Final = """
ExecutePlanRequest: session_id client_observed_server_side_session_id user_context operation_id
    plan client_type request_options tags
UserContext: user_id user_name extensions
PipelineAnalysisContext: dataflow_graph_id definition_path flow_name flow_identifier
ResolvedIdentifier: catalog_name namespace table_name
Plan: root command
Relation: common read project filter join set_op sort limit aggregate sql local_relation sample
    offset deduplicate range subquery_alias repartition to_df with_columns_renamed show_string
    drop tail with_columns hint unpivot to_schema repartition_by_expression collect_metrics
    parse with_watermark html_string cached_remote_relation as_of_join with_relations transpose
    unresolved_table_valued_function lateral_join relation_changes nearest_by_join zip fill_na
    drop_na replace summary crosstab describe cov corr approx_quantile freq_items sample_by
    catalog
RelationCommon: source_info plan_id origin
Origin: python_origin jvm_origin
PythonOrigin: fragment call_site
JvmOrigin: line start_position start_index stop_index sql_text object_type object_name
    stack_trace
StackTraceElement: class_loader_name module_name module_version declaring_class method_name
    file_name line_number
Read: named_table is_streaming
Read.NamedTable: unparsed_identifier options
Project: input expressions
Expression: common literal unresolved_attribute unresolved_function expression_string
    unresolved_star alias cast unresolved_regex sort_order lambda_function window
    unresolved_extract_value update_fields unresolved_named_lambda_variable
    named_argument_expression subquery_expression direct_shuffle_partition_id
ExpressionCommon: origin
Expression.Literal: null binary boolean byte short integer long float double decimal string date
    timestamp timestamp_ntz calendar_interval year_month_interval day_time_interval array map
    struct specialized_array time timestamp_ntz_nanos timestamp_ltz_nanos data_type
DataType: null binary boolean byte short integer long float double decimal string char var_char
    date timestamp timestamp_ntz calendar_interval year_month_interval day_time_interval array
    struct map variant geometry geography unparsed time timestamp_ntz_nanos timestamp_ltz_nanos
DataType.NULL: type_variation_reference
DataType.Binary: type_variation_reference
DataType.Boolean: type_variation_reference
DataType.Byte: type_variation_reference
DataType.Short: type_variation_reference
DataType.Integer: type_variation_reference
DataType.Long: type_variation_reference
DataType.Float: type_variation_reference
DataType.Double: type_variation_reference
DataType.Decimal: scale precision type_variation_reference
DataType.String: type_variation_reference collation
DataType.Char: length type_variation_reference
DataType.VarChar: length type_variation_reference
DataType.Date: type_variation_reference
DataType.Timestamp: type_variation_reference
DataType.TimestampNTZ: type_variation_reference
DataType.CalendarInterval: type_variation_reference
DataType.YearMonthInterval: start_field end_field type_variation_reference
DataType.DayTimeInterval: start_field end_field type_variation_reference
DataType.Array: element_type contains_null type_variation_reference
DataType.Struct: fields type_variation_reference
DataType.StructField: name data_type nullable metadata
DataType.Map: key_type value_type value_contains_null type_variation_reference
DataType.Variant: type_variation_reference
DataType.Geometry: srid type_variation_reference
DataType.Geography: srid type_variation_reference
DataType.Unparsed: data_type_string
DataType.Time: precision type_variation_reference
DataType.TimestampNTZNanos: precision type_variation_reference
DataType.TimestampLTZNanos: precision type_variation_reference
Expression.Literal.Decimal: value precision scale
Expression.Literal.CalendarInterval: months days microseconds
Expression.Literal.Array: element_type elements
Expression.Literal.Map: key_type value_type keys values
Expression.Literal.Struct: struct_type elements
Expression.Literal.SpecializedArray: bools ints longs floats doubles strings
Bools: values
Ints: values
Longs: values
Floats: values
Doubles: values
Strings: values
Expression.Literal.Time: nano precision
Expression.Literal.TimestampNTZNanos: epoch_micros nanos_within_micro precision
Expression.Literal.TimestampLTZNanos: epoch_micros nanos_within_micro precision
Expression.UnresolvedAttribute: unparsed_identifier plan_id
Expression.UnresolvedFunction: function_name arguments is_distinct
Expression.ExpressionString: expression
Expression.UnresolvedStar: unparsed_target plan_id
Expression.Alias: expr name metadata
Expression.Cast: expr type type_str eval_mode
Expression.UnresolvedRegex: col_name plan_id
Expression.SortOrder: child direction null_ordering
Expression.LambdaFunction: function arguments
Expression.UnresolvedNamedLambdaVariable: name_parts
Expression.Window: window_function partition_spec order_spec frame_spec
Expression.Window.WindowFrame: frame_type lower upper
Expression.Window.WindowFrame.FrameBoundary: current_row unbounded value
Expression.UnresolvedExtractValue: child extraction
Expression.UpdateFields: struct_expression field_name value_expression
NamedArgumentExpression: key value
SubqueryExpression: plan_id subquery_type table_arg_options in_subquery_values
SubqueryExpression.TableArgOptions: partition_spec order_spec with_single_partition
Expression.DirectShufflePartitionID: child
Filter: input condition
Join: left right join_condition join_type using_columns join_data_type
Join.JoinDataType: is_left_struct is_right_struct
SetOperation: left_input right_input set_op_type is_all by_name allow_missing_columns
Sort: input order is_global
Limit: input limit
Aggregate: input group_type grouping_expressions aggregate_expressions pivot grouping_sets
Aggregate.Pivot: col values
Aggregate.GroupingSets: grouping_set
SQL: query args pos_args named_arguments pos_arguments
LocalRelation: data schema
Sample: input lower_bound upper_bound with_replacement seed deterministic_order
Offset: input offset
Deduplicate: input column_names all_columns_as_keys within_watermark
Range: start end step num_partitions
SubqueryAlias: input alias qualifier
Repartition: input num_partitions shuffle
ToDF: input column_names
WithColumnsRenamed: input rename_columns_map renames
WithColumnsRenamed.Rename: col_name new_col_name
ShowString: input num_rows truncate vertical
Drop: input columns column_names
Tail: input limit
WithColumns: input aliases
Hint: input name parameters
Unpivot: input ids values variable_column_name value_column_name
Unpivot.Values: values
ToSchema: input schema
RepartitionByExpression: input partition_exprs num_partitions
CollectMetrics: input name metrics
Parse: input format schema options
WithWatermark: input event_time delay_threshold
HtmlString: input num_rows truncate
CachedRemoteRelation: relation_id
AsOfJoin: left right left_as_of right_as_of join_expr using_columns join_type tolerance
    allow_exact_matches direction
WithRelations: root references
Transpose: input index_columns
UnresolvedTableValuedFunction: function_name arguments
LateralJoin: left right join_condition join_type
RelationChanges: unparsed_identifier options is_streaming
NearestByJoin: left right ranking_expression num_results join_type mode direction
Zip: left right
NAFill: input cols values
NADrop: input cols min_non_nulls
NAReplace: input cols replacements
NAReplace.Replacement: old_value new_value
StatSummary: input statistics
StatCrosstab: input col1 col2
StatDescribe: input cols
StatCov: input col1 col2
StatCorr: input col1 col2 method
StatApproxQuantile: input cols probabilities relative_error
StatFreqItems: input cols support
StatSampleBy: input col fractions seed
StatSampleBy.Fraction: stratum fraction
Catalog: current_database list_tables list_functions list_columns get_table get_function
    database_exists table_exists function_exists drop_temp_view is_cached cache_table
    uncache_table refresh_table current_catalog list_catalogs list_views get_table_properties
    get_create_table_string
CurrentDatabase:
ListTables: db_name pattern
ListFunctions: db_name pattern
ListColumns: table_name db_name
GetTable: table_name db_name
GetFunction: function_name db_name
DatabaseExists: db_name
TableExists: table_name db_name
FunctionExists: function_name db_name
DropTempView: view_name
IsCached: table_name
CacheTable: table_name storage_level
StorageLevel: use_disk use_memory use_off_heap deserialized replication
UncacheTable: table_name
RefreshTable: table_name
CurrentCatalog:
ListCatalogs: pattern
ListViews: db_name pattern
GetTableProperties: table_name
GetCreateTableString: table_name as_serde
Command: write_operation create_dataframe_view write_operation_v2 sql_command
    write_stream_operation_start streaming_query_command streaming_query_manager_command
    streaming_query_listener_bus_command checkpoint_command
    remove_cached_remote_relation_command pipeline_command
WriteOperation: input table mode
WriteOperation.SaveTable: table_name save_method
CreateDataFrameViewCommand: input name replace
WriteOperationV2: input table_name mode
SqlCommand: sql args pos_args named_arguments pos_arguments input
WriteStreamOperationStart: input format processing_time_interval available_now once output_mode
    query_name
StreamingQueryCommand: query_id status last_progress recent_progress stop process_all_available
    explain exception await_termination
StreamingQueryInstanceId: id run_id
StreamingQueryCommand.ExplainCommand: extended
StreamingQueryCommand.AwaitTerminationCommand: timeout_ms
StreamingQueryManagerCommand: active get_query await_any_termination reset_terminated
    list_listeners
StreamingQueryManagerCommand.AwaitAnyTerminationCommand: timeout_ms
StreamingQueryListenerBusCommand: add_listener_bus_listener remove_listener_bus_listener
CheckpointCommand: relation local eager storage_level
RemoveCachedRemoteRelationCommand: relation
PipelineCommand: create_dataflow_graph define_output define_flow drop_dataflow_graph start_run
    define_sql_graph_elements
PipelineCommand.CreateDataflowGraph: default_catalog default_database sql_conf
PipelineCommand.DefineOutput: dataflow_graph_id output_name output_type comment
    source_code_location table_details sink_details
SourceCodeLocation: file_name line_number definition_path
PipelineCommand.DefineOutput.TableDetails: table_properties partition_cols format
    schema_data_type schema_string clustering_columns
PipelineCommand.DefineOutput.SinkDetails: options format
PipelineCommand.DefineFlow: dataflow_graph_id flow_name target_dataset_name sql_conf client_id
    source_code_location relation_flow_details once
PipelineCommand.DefineFlow.WriteRelationFlowDetails: relation
PipelineCommand.DropDataflowGraph: dataflow_graph_id
PipelineCommand.StartRun: dataflow_graph_id full_refresh_selection full_refresh_all
    refresh_selection dry
PipelineCommand.DefineSqlGraphElements: dataflow_graph_id sql_file_path sql_text
ExecutePlanRequest.RequestOption: reattach_options result_chunking_options
ReattachOptions: reattachable
ResultChunkingOptions: allow_arrow_batch_chunking preferred_arrow_chunk_size
AnalyzePlanRequest: session_id client_observed_server_side_session_id user_context client_type
    schema explain tree_string is_local is_streaming spark_version ddl_parse same_semantics
    semantic_hash persist unpersist get_storage_level json_to_ddl
AnalyzePlanRequest.Schema: plan
AnalyzePlanRequest.Explain: plan explain_mode
AnalyzePlanRequest.TreeString: plan level
AnalyzePlanRequest.IsLocal: plan
AnalyzePlanRequest.IsStreaming: plan
AnalyzePlanRequest.SparkVersion:
AnalyzePlanRequest.DDLParse: ddl_string
AnalyzePlanRequest.SameSemantics: target_plan other_plan
AnalyzePlanRequest.SemanticHash: plan
AnalyzePlanRequest.Persist: relation storage_level
AnalyzePlanRequest.Unpersist: relation blocking
AnalyzePlanRequest.GetStorageLevel: relation
AnalyzePlanRequest.JsonToDDL: json_string
ConfigRequest: session_id client_observed_server_side_session_id user_context operation
    client_type
ConfigRequest.Operation: set get get_with_default get_option get_all unset is_modifiable
ConfigRequest.Set: pairs silent
KeyValue: key value
ConfigRequest.Get: keys
ConfigRequest.GetWithDefault: pairs
ConfigRequest.GetOption: keys
ConfigRequest.GetAll: prefix
ConfigRequest.Unset: keys
ConfigRequest.IsModifiable: keys
InterruptRequest: session_id client_observed_server_side_session_id user_context client_type
    interrupt_type operation_tag operation_id
ReattachExecuteRequest: session_id client_observed_server_side_session_id user_context
    operation_id client_type last_response_id
ReleaseExecuteRequest: session_id client_observed_server_side_session_id user_context
    operation_id client_type release_all release_until
ReleaseExecuteRequest.ReleaseAll:
ReleaseExecuteRequest.ReleaseUntil: response_id
ReleaseSessionRequest: session_id user_context client_type allow_reconnect
FetchErrorDetailsRequest: session_id client_observed_server_side_session_id user_context
    error_id client_type
CloneSessionRequest: session_id client_observed_server_side_session_id user_context client_type
    new_session_id
GetStatusRequest: session_id user_context client_type client_observed_server_side_session_id
    operation_status
GetStatusRequest.OperationStatusRequest: operation_ids
"""
"""Messages with their permitted fields. Messages that these fields cannot reach are in neither
list."""
_REFUSED: Final = """
AddArtifactsRequest
ArtifactStatusesRequest
Relation: map_partitions group_map co_group_map apply_in_pandas_with_state cached_local_relation
    chunked_cached_local_relation common_inline_user_defined_table_function
    common_inline_user_defined_data_source ml_relation extension unknown
Command: register_function register_table_function register_data_source get_resources_command
    create_resource_profile_command merge_into_table_command ml_command execute_external_command
    extension
Expression: common_inline_user_defined_function call_function merge_action
    typed_aggregate_expression extension
Read: data_source
ExecutePlanRequest.RequestOption: extension
AnalyzePlanRequest: input_files
GetStatusRequest: extensions
GetStatusRequest.OperationStatusRequest: extensions
PipelineAnalysisContext: extension
Plan: compressed_operation
DataType: udt
WriteOperation: source path sort_column_names partitioning_columns bucket_by options
    clustering_columns with_schema_evolution
WriteOperationV2: provider partitioning_columns options table_properties overwrite_condition
    clustering_columns with_schema_evolution
CreateDataFrameViewCommand: is_global
WriteStreamOperationStart: options partitioning_column_names continuous_checkpoint_interval
    real_time_batch_duration path table_name foreach_writer foreach_batch
    clustering_column_names
StreamingQueryManagerCommand: add_listener remove_listener
Catalog: list_databases get_database set_current_database create_external_table create_table
    drop_global_temp_view recover_partitions clear_cache refresh_by_path set_current_catalog
    drop_table drop_view create_database drop_database list_partitions truncate_table
    analyze_table
Expression.UnresolvedAttribute: is_metadata_column
Expression.UnresolvedFunction: is_user_defined_function is_internal
PipelineCommand: get_query_function_execution_signal_stream define_flow_query_function_result
    execute_output_flows extension
PipelineCommand.DefineOutput: extension
PipelineCommand.DefineFlow: auto_cdc_flow_details extension
PipelineCommand.StartRun: storage
SourceCodeLocation: extension
"""
"""Messages with the fields that require the right to run code; all fields if none is listed."""


def _listed(text: str) -> Mapping[str, frozenset[str]]:
    """Parse a list into the fields of each message, by the message's full name."""
    found: dict[str, frozenset[str]] = {}
    for line in text.replace("\n    ", " ").strip().splitlines():
        name, _, fields = line.partition(":")
        found[PREFIX + name] = frozenset(fields.split())
    return found


PERMITTED_FIELDS: Final = _listed(_PERMITTED)
REFUSED_FIELDS: Final = _listed(_REFUSED)
