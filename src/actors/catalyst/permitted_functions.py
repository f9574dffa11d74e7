"""The functions and constructs of Spark SQL that reach nothing outside of a query. Pure.

Everybody who may run a query may use these. What is not among them is for administrators: it may
open a file or an address, call code, or tell of the service's machine. The lists name classes of
Spark, since a name may stand for another function in a user's Spark. They are made from Spark's
own registries, of every release that the service runs on: a test compares them, and fails when a
release has a function that is in none of them. Whoever adds it here has looked at what it does.

`StatementInspector.java` compares statements with them, as they are parsed and as they are
analysed.
"""

from __future__ import annotations

from typing import Final

_CATALYST: Final = "org.apache.spark.sql.catalyst."
_EXPRESSIONS: Final = f"{_CATALYST}expressions."

_FUNCTIONS: Final = """
Abs=abs Acos=acos Acosh=acosh Add=+ AddMonths=add_months AesDecrypt=aes_decrypt
AesEncrypt=aes_encrypt And=and ApproxTopKEstimate=approx_top_k_estimate
ArrayAggregate=aggregate,reduce ArrayAppend=array_append ArrayCompact=array_compact
ArrayContains=array_contains ArrayDistinct=array_distinct ArrayExcept=array_except
ArrayExists=exists ArrayFilter=filter ArrayForAll=forall ArrayInsert=array_insert
ArrayIntersect=array_intersect ArrayJoin=array_join ArrayMax=array_max ArrayMin=array_min
ArrayPosition=array_position ArrayPrepend=array_prepend ArrayRemove=array_remove
ArrayRepeat=array_repeat ArraySize=array_size ArraySort=array_sort ArrayTransform=transform
ArrayUnion=array_union ArraysOverlap=arrays_overlap ArraysZip=arrays_zip Ascii=ascii Asin=asin
Asinh=asinh AssertTrue=assert_true Atan=atan Atan2=atan2 Atanh=atanh BRound=bround
Base32=to_base32 Base64=base64 Between=between Bin=bin BitLength=bit_length
BitmapAndAgg=bitmap_and_agg BitmapBitPosition=bitmap_bit_position
BitmapBucketNumber=bitmap_bucket_number BitmapConstructAgg=bitmap_construct_agg
BitmapCount=bitmap_count BitmapOrAgg=bitmap_or_agg BitwiseAnd=& BitwiseCount=bit_count
BitwiseGet=bit_get,getbit BitwiseNot=~ BitwiseOr=| BitwiseXor=^ CaseWhen=when
Cast=bigint,binary,boolean,cast,date,decimal,double,float,int,smallint,string,time,timestamp,tinyint
Cbrt=cbrt CeilExpressionBuilder=ceil,ceiling Chr=char,chr Coalesce=coalesce
CollateExpressionBuilder=collate Collation=collation Concat=concat ConcatWs=concat_ws
ContainsExpressionBuilder=contains Conv=conv ConvertTimezone=convert_timezone Cos=cos Cosh=cosh
Cot=cot CounterDiffExpressionBuilder=counter_diff Crc32=crc32 CreateArray=array CreateMap=map
CreateNamedStruct=named_struct,struct Csc=csc CsvToStructs=from_csv CumeDist=cume_dist
CurDateExpressionBuilder=curdate CurrentCatalog=current_catalog
CurrentDatabase=current_database,current_schema CurrentDate=current_date CurrentPath=current_path
CurrentTime=current_time,localtime CurrentTimeZone=current_timezone
CurrentTimestamp=current_timestamp CurrentTimestampExpressionBuilder=current_timestamp
CurrentUser=current_user,session_user,user DateAdd=date_add,dateadd DateDiff=date_diff,datediff
DateFormatClass=date_format DateFromUnixDate=date_from_unix_date
DatePartExpressionBuilder=date_part,datepart DateSub=date_sub DayName=dayname
DayOfMonth=day,dayofmonth DayOfWeek=dayofweek DayOfYear=dayofyear Decode=decode
DenseRank=dense_rank Divide=/ ElementAt=element_at Elt=elt Encode=encode
EndsWithExpressionBuilder=endswith EqualNull=equal_null EqualNullSafe=<=> EqualTo==,==
EulerNumber=e Exp=exp ExplodeExpressionBuilder=explode,explode_outer Expm1=expm1 Extract=extract
Factorial=factorial FindInSet=find_in_set Flatten=flatten FloorExpressionBuilder=floor
FormatNumber=format_number FormatString=format_string,printf FromUTCTimestamp=from_utc_timestamp
FromUnixTime=from_unixtime Get=get GetJsonObject=get_json_object GreaterThan=>
GreaterThanOrEqual=>= Greatest=greatest Grouping=grouping GroupingID=grouping_id Hex=hex
HllSketchEstimate=hll_sketch_estimate HllUnion=hll_union Hmac=hmac Hour=hour
HourExpressionBuilder=hour Hypot=hypot ILike=ilike If=if In=in InitCap=initcap
InlineExpressionBuilder=inline,inline_outer IntegralDivide=div IsNaN=isnan IsNotNull=isnotnull
IsNull=isnull IsValidUTF8=is_valid_utf8 JaroWinkler=jaro_winkler_similarity
JsonObjectKeys=json_object_keys JsonToStructs=from_json JsonTuple=json_tuple
KllSketchGetNBigint=kll_sketch_get_n_bigint KllSketchGetNDouble=kll_sketch_get_n_double
KllSketchGetNFloat=kll_sketch_get_n_float
KllSketchGetQuantileBigint=kll_sketch_get_quantile_bigint
KllSketchGetQuantileDouble=kll_sketch_get_quantile_double
KllSketchGetQuantileFloat=kll_sketch_get_quantile_float
KllSketchGetRankBigint=kll_sketch_get_rank_bigint
KllSketchGetRankDouble=kll_sketch_get_rank_double KllSketchGetRankFloat=kll_sketch_get_rank_float
KllSketchMergeBigint=kll_sketch_merge_bigint KllSketchMergeDouble=kll_sketch_merge_double
KllSketchMergeFloat=kll_sketch_merge_float KllSketchToStringBigint=kll_sketch_to_string_bigint
KllSketchToStringDouble=kll_sketch_to_string_double
KllSketchToStringFloat=kll_sketch_to_string_float LPadExpressionBuilder=lpad Lag=lag
LastDay=last_day Lead=lead Least=least Left=left Length=char_length,character_length,len,length
LengthOfJsonArray=json_array_length LessThan=< LessThanOrEqual=<= Levenshtein=levenshtein
Like=like LocalTimestamp=localtimestamp LocalTimestampExpressionBuilder=localtimestamp Log=ln
Log10=log10 Log1p=log1p Log2=log2 Logarithm=log Lower=lcase,lower Luhncheck=luhn_check
MakeDTInterval=make_dt_interval MakeDate=make_date MakeInterval=make_interval MakeTime=make_time
MakeTimestamp=make_timestamp MakeTimestampExpressionBuilder=make_timestamp
MakeTimestampLTZExpressionBuilder=make_timestamp_ltz
MakeTimestampNTZExpressionBuilder=make_timestamp_ntz MakeValidUTF8=make_valid_utf8
MakeYMInterval=make_ym_interval MapConcat=map_concat MapContainsKey=map_contains_key
MapEntries=map_entries MapFilter=map_filter MapFromArrays=map_from_arrays
MapFromEntries=map_from_entries MapKeys=map_keys MapValues=map_values MapZipWith=map_zip_with
MaskExpressionBuilder=mask Md5=md5 MicrosToTimestamp=timestamp_micros
MillisToTimestamp=timestamp_millis Minute=minute MinuteExpressionBuilder=minute
MonotonicallyIncreasingID=monotonically_increasing_id Month=month MonthName=monthname
MonthsBetween=months_between Multiply=* Murmur3Hash=hash NTile=ntile NaNvl=nanvl
NanosToTimestamp=timestamp_nanos NextDay=next_day Not=!,not Now=now NowExpressionBuilder=now
NthValue=nth_value NullIf=nullif NullIfZero=nullifzero Nvl=ifnull,nvl Nvl2=nvl2
OctetLength=octet_length Or=or Overlay=overlay ParseToDate=to_date ParseToTimestamp=to_timestamp
ParseToTimestampLTZExpressionBuilder=to_timestamp_ltz
ParseToTimestampNTZExpressionBuilder=to_timestamp_ntz ParseUrl=parse_url PercentRank=percent_rank
Pi=pi Pmod=pmod PosExplodeExpressionBuilder=posexplode,posexplode_outer Pow=pow,power
Quarter=quarter Quote=quote RLike=regexp,regexp_like,rlike RPadExpressionBuilder=rpad
RaiseErrorExpressionBuilder=raise_error Rand=rand,random RandStr=randstr Randn=randn Rank=rank
RegExpCount=regexp_count RegExpExtract=regexp_extract RegExpExtractAll=regexp_extract_all
RegExpInStr=regexp_instr RegExpReplace=regexp_replace RegExpSubStr=regexp_substr Remainder=%,mod
Reverse=reverse Right=right Rint=rint Round=round RowNumber=row_number SchemaOfCsv=schema_of_csv
SchemaOfJson=schema_of_json SchemaOfXml=schema_of_xml Sec=sec Second=second
SecondExpressionBuilder=second SecondsToTimestamp=timestamp_seconds Sentences=sentences
Sequence=sequence SessionWindow=session_window Sha1=sha,sha1 Sha2=sha2 ShiftLeft=<<,shiftleft
ShiftRight=>>,shiftright ShiftRightUnsigned=>>>,shiftrightunsigned Shuffle=shuffle
Signum=sign,signum Sin=sin Sinh=sinh Size=cardinality,size Slice=slice SortArray=sort_array
SoundEx=soundex SparkPartitionID=spark_partition_id SparkVersion=version SplitPart=split_part
Sqrt=sqrt Stack=stack StartsWithExpressionBuilder=startswith StringInstr=instr
StringInstrExpressionBuilder=instr StringLocate=locate,position StringRepeat=repeat
StringReplace=replace StringSpace=space StringSplit=split StringToMap=str_to_map
StringTranslate=translate StringTrim=trim StringTrimBoth=btrim StringTrimLeft=ltrim
StringTrimRight=rtrim StructsToCsv=to_csv StructsToJson=to_json StructsToXml=to_xml
Substring=substr,substring SubstringIndex=substring_index Subtract=- Tan=tan Tanh=tanh
ThetaDifference=theta_difference ThetaIntersection=theta_intersection
ThetaSketchEstimate=theta_sketch_estimate ThetaUnion=theta_union
TimeBucketExpressionBuilder=time_bucket TimeDiff=time_diff TimeFromMicros=time_from_micros
TimeFromMillis=time_from_millis TimeFromSeconds=time_from_seconds TimeToMicros=time_to_micros
TimeToMillis=time_to_millis TimeToSeconds=time_to_seconds TimeTrunc=time_trunc TimeWindow=window
ToBinary=to_binary ToCharacterBuilder=to_char,to_varchar ToDegrees=degrees ToNumber=to_number
ToRadians=radians ToTime=to_time ToUTCTimestamp=to_utc_timestamp ToUnixTimestamp=to_unix_timestamp
TransformKeys=transform_keys TransformValues=transform_values TruncDate=trunc
TruncTimestamp=date_trunc TryAdd=try_add TryAesDecrypt=try_aes_decrypt TryDivide=try_divide
TryElementAt=try_element_at TryMakeInterval=try_make_interval TryMakeTimestamp=try_make_timestamp
TryMakeTimestampExpressionBuilder=try_make_timestamp
TryMakeTimestampLTZExpressionBuilder=try_make_timestamp_ltz
TryMakeTimestampNTZExpressionBuilder=try_make_timestamp_ntz TryMod=try_mod
TryMultiply=try_multiply TryParseUrl=try_parse_url TrySubtract=try_subtract
TryToBinary=try_to_binary TryToDateExpressionBuilder=try_to_date TryToNumber=try_to_number
TryToTimeExpressionBuilder=try_to_time TryToTimestampExpressionBuilder=try_to_timestamp
TryUrlDecode=try_url_decode TryValidateUTF8=try_validate_utf8
TupleDifferenceDouble=tuple_difference_double TupleDifferenceInteger=tuple_difference_integer
TupleDifferenceThetaDouble=tuple_difference_theta_double
TupleDifferenceThetaInteger=tuple_difference_theta_integer
TupleIntersectionDouble=tuple_intersection_double
TupleIntersectionInteger=tuple_intersection_integer
TupleIntersectionThetaDouble=tuple_intersection_theta_double
TupleIntersectionThetaInteger=tuple_intersection_theta_integer
TupleSketchEstimateDouble=tuple_sketch_estimate_double
TupleSketchEstimateInteger=tuple_sketch_estimate_integer
TupleSketchSummaryDouble=tuple_sketch_summary_double
TupleSketchSummaryInteger=tuple_sketch_summary_integer
TupleSketchThetaDouble=tuple_sketch_theta_double
TupleSketchThetaInteger=tuple_sketch_theta_integer
TupleUnionDoubleExpressionBuilder=tuple_union_double
TupleUnionIntegerExpressionBuilder=tuple_union_integer
TupleUnionThetaDoubleExpressionBuilder=tuple_union_theta_double
TupleUnionThetaIntegerExpressionBuilder=tuple_union_theta_integer TypeOf=typeof
UnBase32=from_base32 UnBase64=unbase64 UnaryMinus=negative UnaryPositive=positive Unhex=unhex
Uniform=uniform UnixDate=unix_date UnixMicros=unix_micros UnixMillis=unix_millis
UnixNanos=unix_nanos UnixSeconds=unix_seconds UnixTimestamp=unix_timestamp Upper=ucase,upper
UrlDecode=url_decode UrlEncode=url_encode Uuid=uuid ValidateUTF8=validate_utf8
VectorAvg=vector_avg VectorCosineSimilarity=vector_cosine_similarity
VectorInnerProduct=vector_inner_product VectorL2Distance=vector_l2_distance VectorNorm=vector_norm
VectorNormalize=vector_normalize VectorSum=vector_sum WeekDay=weekday WeekOfYear=weekofyear
WidthBucket=width_bucket WindowTime=window_time XmlToStructs=from_xml XxHash64=xxhash64 Year=year
ZeroIfNull=zeroifnull ZipWith=zip_with aggregate.AnyValue=any_value
aggregate.ApproxTopK=approx_top_k aggregate.ApproxTopKAccumulate=approx_top_k_accumulate
aggregate.ApproxTopKCombine=approx_top_k_combine
aggregate.ApproximatePercentile=approx_percentile,percentile_approx aggregate.Average=avg,mean
aggregate.BitAndAgg=bit_and aggregate.BitOrAgg=bit_or aggregate.BitXorAgg=bit_xor
aggregate.BoolAnd=bool_and,every aggregate.BoolOr=any,bool_or,some
aggregate.CollectList=array_agg,collect_list aggregate.CollectSet=collect_set
aggregate.CollectUnion=collect_union aggregate.Corr=corr aggregate.Count=count
aggregate.CountIf=count_if aggregate.CountMinSketchAggExpressionBuilder=count_min_sketch
aggregate.CovPopulation=covar_pop aggregate.CovSample=covar_samp aggregate.First=first,first_value
aggregate.HistogramNumeric=histogram_numeric aggregate.HllSketchAgg=hll_sketch_agg
aggregate.HllUnionAgg=hll_union_agg aggregate.HyperLogLogPlusPlus=approx_count_distinct
aggregate.KllMergeAggBigint=kll_merge_agg_bigint aggregate.KllMergeAggDouble=kll_merge_agg_double
aggregate.KllMergeAggFloat=kll_merge_agg_float aggregate.KllSketchAggBigint=kll_sketch_agg_bigint
aggregate.KllSketchAggDouble=kll_sketch_agg_double
aggregate.KllSketchAggFloat=kll_sketch_agg_float aggregate.Kurtosis=kurtosis
aggregate.Last=last,last_value aggregate.ListAgg=listagg,string_agg aggregate.Max=max
aggregate.MaxBy=max_by aggregate.MaxByBuilder=max_by aggregate.Measure=measure
aggregate.Median=median aggregate.Min=min aggregate.MinBy=min_by aggregate.MinByBuilder=min_by
aggregate.ModeBuilder=mode aggregate.Percentile=percentile
aggregate.PercentileContBuilder=percentile_cont aggregate.PercentileDiscBuilder=percentile_disc
aggregate.RegrAvgX=regr_avgx aggregate.RegrAvgY=regr_avgy aggregate.RegrCount=regr_count
aggregate.RegrIntercept=regr_intercept aggregate.RegrR2=regr_r2 aggregate.RegrSXX=regr_sxx
aggregate.RegrSXY=regr_sxy aggregate.RegrSYY=regr_syy aggregate.RegrSlope=regr_slope
aggregate.Skewness=skewness aggregate.StddevPop=stddev_pop
aggregate.StddevSamp=std,stddev,stddev_samp aggregate.Sum=sum
aggregate.ThetaIntersectionAgg=theta_intersection_agg aggregate.ThetaSketchAgg=theta_sketch_agg
aggregate.ThetaUnionAgg=theta_union_agg aggregate.TryAverageExpressionBuilder=try_avg
aggregate.TrySumExpressionBuilder=try_sum
aggregate.TupleIntersectionAggDouble=tuple_intersection_agg_double
aggregate.TupleIntersectionAggInteger=tuple_intersection_agg_integer
aggregate.TupleSketchAggDoubleExpressionBuilder=tuple_sketch_agg_double
aggregate.TupleSketchAggIntegerExpressionBuilder=tuple_sketch_agg_integer
aggregate.TupleUnionAggDoubleExpressionBuilder=tuple_union_agg_double
aggregate.TupleUnionAggIntegerExpressionBuilder=tuple_union_agg_integer
aggregate.VariancePop=var_pop aggregate.VarianceSamp=var_samp,variance st.ST_AsBinary=st_asbinary
st.ST_GeogFromWKB=st_geogfromwkb st.ST_GeomFromWKB=st_geomfromwkb st.ST_SetSrid=st_setsrid
st.ST_Srid=st_srid variant.IsValidVariant=is_valid_variant variant.IsVariantNull=is_variant_null
variant.ParseJsonExpressionBuilder=parse_json variant.SchemaOfVariant=schema_of_variant
variant.SchemaOfVariantAgg=schema_of_variant_agg variant.ToVariantObject=to_variant_object
variant.TryParseJsonExpressionBuilder=try_parse_json
variant.TryVariantArrayAppendExpressionBuilder=try_variant_array_append
variant.TryVariantGetExpressionBuilder=try_variant_get
variant.TryVariantInsertExpressionBuilder=try_variant_insert
variant.TryVariantSetExpressionBuilder=try_variant_set
variant.VariantArrayAppendExpressionBuilder=variant_array_append
variant.VariantDelete=variant_delete variant.VariantGetExpressionBuilder=variant_get
variant.VariantInsertExpressionBuilder=variant_insert
variant.VariantSetExpressionBuilder=variant_set
variant.VariantStripNullsExpressionBuilder=variant_strip_nulls
"""
"""Class of the registry below `_EXPRESSIONS`, with the names that it has or had."""
_TABLE_FUNCTIONS: Final = """
expressions.Collations=collations expressions.ExplodeGeneratorBuilder=explode
expressions.ExplodeOuterGeneratorBuilder=explode_outer expressions.InlineGeneratorBuilder=inline
expressions.InlineOuterGeneratorBuilder=inline_outer expressions.JsonTuple=json_tuple
expressions.PosExplodeGeneratorBuilder=posexplode
expressions.PosExplodeOuterGeneratorBuilder=posexplode_outer expressions.SQLKeywords=sql_keywords
expressions.Stack=stack expressions.variant.VariantExplodeGeneratorBuilder=variant_explode
expressions.variant.VariantExplodeOuterGeneratorBuilder=variant_explode_outer
plans.logical.Range=range
"""
"""The same of functions that are called as tables, below `_CATALYST`."""
_REFUSED: Final = """
CallMethodViaReflection=java_method,reflect FromAvro=from_avro FromProtobuf=from_protobuf
InputFileBlockLength=input_file_block_length InputFileBlockStart=input_file_block_start
InputFileName=input_file_name SchemaOfAvro=schema_of_avro ToAvro=to_avro ToProtobuf=to_protobuf
TryReflect=try_reflect xml.XPathBoolean=xpath_boolean xml.XPathDouble=xpath_double,xpath_number
xml.XPathFloat=xpath_float xml.XPathInt=xpath_int xml.XPathList=xpath xml.XPathLong=xpath_long
xml.XPathShort=xpath_short xml.XPathString=xpath_string
"""
"""Functions that call code, tell of files, or open what they are given: XPath fetches the DTD that
a document names."""
_REFUSED_TABLE_FUNCTIONS: Final = """
plans.logical.PythonWorkerLogs=python_worker_logs
"""
_EXPRESSION_CLASSES: Final = """
Alias ArrayBinarySearch AtLeastNNonNulls AttributeReference BinaryPad BinaryPredicate
BoundReference Ceil CheckOverflow CheckOverflowInSum Collate CollationAwareMurmur3Hash
CollationAwareXxHash64 CollationKey Collations CommonExpressionDef CommonExpressionRef Contains
CounterDiff CounterDiffWithStartTime Cube CurrentRow$ CurrentTimestampNanos DateAddInterval
DateAddYMInterval DatetimeSub DecimalAddNoOverflowCheck DecimalDivideWithOverflowCheck
DecimalSubtractNoOverflowCheck DivideDTInterval DivideInterval DivideYMInterval DropField
Empty2Null EndsWith Exists Explode ExtractANSIIntervalDays ExtractANSIIntervalHours
ExtractANSIIntervalMinutes ExtractANSIIntervalMonths ExtractANSIIntervalSeconds
ExtractANSIIntervalYears ExtractIntervalDays ExtractIntervalHours ExtractIntervalMinutes
ExtractIntervalMonths ExtractIntervalSeconds ExtractIntervalYears Floor
FunctionTableSubqueryArgumentExpression GeneratorOuter GetArrayItem GetArrayStructFields
GetMapValue GetStructField GetTimestamp GroupingSets HoursOfTime InSet InSubquery Inline
IsNotUnknown$$anon$2 IsUnknown$$anon$1 JsonTable KnownFloatingPointNormalized KnownNotContainsNull
KnownNotNull KnownNullable LambdaFunction LateralColumnAliasReference LateralSubquery LikeAll
LikeAny ListQuery Literal LocalTimestampNanos MakeDecimal MakeTimestampFromDateTime
MakeTimestampLTZ MakeTimestampLTZNanos MakeTimestampNTZ MakeTimestampNTZNanos MapSort Mask
MinutesOfTime MultiCommutativeOp MultiGetJsonObject MultiplyDTInterval MultiplyInterval
MultiplyYMInterval NamePlaceholder$ NamedArgumentExpression NamedLambdaVariable NotLikeAll
NotLikeAny NullIfResult OuterReference OuterScopeReference PipeExpression PosExplode
PreciseTimestampConversion PrettyAttribute RaiseError ResolvedCollation Rollup RoundCeil
RoundFloor SQLKeywords ScalarSubquery SecondWithFraction SecondWithFractionNanos SecondsOfTime
SecondsOfTimeWithFraction SemiStructuredExtract SortOrder SpecifiedWindowFrame StartsWith
StringDecode StringInstrWithOccurrence StringLPad StringRPad StringSplitSQL SubtractDates
SubtractTimes SubtractTimestamps TimeAdd TimeAddInterval TimeBucket TimestampAdd
TimestampAddInterval TimestampAddYMInterval TimestampDiff ToCharacter ToPrettyString TryEval
TryMakeTimestampFromDateTime TupleUnionDouble TupleUnionInteger TupleUnionThetaDouble
TupleUnionThetaInteger TypedNullLiteral UnboundedFollowing$ UnboundedPreceding$ Unnest
UnresolvedCollation UnresolvedNamedLambdaVariable UnresolvedWindowExpression UnscaledValue
UnspecifiedFrame$ UnwrapUDT UpCast UpdateFields WindowExpression WindowSpecDefinition With
WithField YearOfWeek aggregate.AggregateExpression aggregate.ApproxCountDistinctForIntervals
aggregate.CollectTopK aggregate.CountMinSketchAgg aggregate.MaxMinByK aggregate.Mode
aggregate.NoOp$ aggregate.PercentileCont aggregate.PercentileDisc aggregate.PivotFirst
aggregate.Product aggregate.RegrReplacement aggregate.TupleSketchAggDouble
aggregate.TupleSketchAggInteger aggregate.TupleUnionAggDouble aggregate.TupleUnionAggInteger
variant.ParseJson variant.UnwrapVariantCastError variant.VariantArrayAppend variant.VariantExplode
variant.VariantGet variant.VariantInsert variant.VariantSet variant.VariantStripNulls
"""
"""What else the parser and the analysis make of a query, below `_EXPRESSIONS`."""
_UNRESOLVED: Final = """
ExpressionWithUnresolvedIdentifier MultiAlias ResolvedStar TempResolvedColumn UnresolvedAlias
UnresolvedAttribute UnresolvedExtractValue UnresolvedFunction UnresolvedGenerator
UnresolvedOrdinal UnresolvedPipeAggregateOrdinal UnresolvedRegex UnresolvedSeed$ UnresolvedStar
UnresolvedStarExceptOrReplace UnresolvedStarWithColumns UnresolvedStarWithColumnsRenames
UnresolvedWithinGroup$
"""
"""What the parser makes of names, below `_CATALYST` + ``analysis.``."""
_PLANS: Final = """
A.PlanWithUnresolvedIdentifier A.ResolvedInlineTable A.UnresolvedHaving A.UnresolvedInlineTable
A.UnresolvedQualify A.UnresolvedRelation A.UnresolvedSubqueryColumnAliases A.UnresolvedTVFAliases
A.UnresolvedTableValuedFunction A.UnresolvedTranspose L.Aggregate L.AsOfJoin L.BinBy
L.CTERelationDef L.CTERelationRef L.DataFrameDropColumns L.Deduplicate L.Distinct L.EmptyRelation
L.Except L.Expand L.Filter L.Generate L.GlobalLimit L.Intersect L.Join L.LateralJoin L.LimitAll
L.LocalLimit L.LocalRelation L.NearestByJoin L.Offset L.OneRowRelation L.Pivot L.Project L.Range
L.RebalancePartitions L.Repartition L.RepartitionByExpression L.ResolvedHint L.Sample L.Sort
L.SubqueryAlias L.Subquery L.Tail L.Transpose L.Union L.UnionLoop L.UnionLoopRef L.Unpivot
L.UnresolvedBinBy L.UnresolvedHint L.UnresolvedWith L.View L.Window L.WithCTE
L.WithWindowDefinition E.PipeOperator
"""
"""Operators of a query, below `_CATALYST` + ``plans.logical.`` (L), ``analysis.`` (A) and
``expressions.`` (E)."""
REFUSED_OPTIONS: Final = frozenset({"rowvalidationxsdpath"})
"""Options of functions that name a file, in lower case."""


def _classes(listing: str, package: str) -> dict[str, frozenset[str]]:
    """Return the names of each class of a listing."""
    found = (entry.split("=", 1) for entry in listing.split())
    return {package + kind: frozenset(names.split(",")) for kind, names in found}


def _names(classes: dict[str, frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*classes.values())


FUNCTIONS: Final = _classes(_FUNCTIONS, _EXPRESSIONS)
"""Names of permitted functions, by the class that Spark's registry has for them."""
TABLE_FUNCTIONS: Final = _classes(_TABLE_FUNCTIONS, _CATALYST)
REFUSED_FUNCTIONS: Final = _classes(_REFUSED, _EXPRESSIONS)
REFUSED_TABLE_FUNCTIONS: Final = _classes(_REFUSED_TABLE_FUNCTIONS, _CATALYST)
FUNCTION_NAMES: Final = _names(FUNCTIONS)
TABLE_FUNCTION_NAMES: Final = _names(TABLE_FUNCTIONS)
REFUSED_NAMES: Final = _names(REFUSED_FUNCTIONS) | _names(REFUSED_TABLE_FUNCTIONS)
_PACKAGES: Final = {"L": "plans.logical.", "A": "analysis.", "E": "expressions."}
NODES: Final = frozenset(
    {
        *FUNCTIONS,
        *(_EXPRESSIONS + name for name in _EXPRESSION_CLASSES.split()),
        *(f"{_CATALYST}analysis.{name}" for name in _UNRESOLVED.split()),
        *(_CATALYST + _PACKAGES[name[0]] + name[2:] for name in _PLANS.split()),
    }
)
"""Classes of all nodes that a query's tree may have, before and after its analysis."""


def is_permitted_function(name: str) -> bool:
    """Return whether everybody may call a function of Spark's own by this name.

    >>> is_permitted_function("UPPER"), is_permitted_function("java_method")
    (True, False)
    """
    return name.lower() in FUNCTION_NAMES


def is_permitted_table_function(name: str) -> bool:
    """Return whether everybody may call a function of Spark's own as a table.

    >>> is_permitted_table_function("range"), is_permitted_table_function("python_worker_logs")
    (True, False)
    """
    return name.lower() in TABLE_FUNCTION_NAMES


def refusal_of(kind: str, name: str) -> str:
    """Return the text of the error for what is not permitted: a "function", an "option" of one, or
    another "construct".

    >>> refusal_of("function", "reflect")
    'permission denied for function reflect: it is none of the functions that reach nothing \
outside of a query, so that only administrators may use it'
    """
    return (
        f"permission denied for {kind} {name}: it is none of the {kind}s that reach nothing "
        "outside of a query, so that only administrators may use it"
    )
